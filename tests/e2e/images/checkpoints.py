"""Tiny checkpoints of models that read images, with random weights and all files of their
processors: what vLLM and transformers need to serve and compute one image."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.gemma3 import Gemma3ImageProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from examples.starter_model.checkpoint import save_model
from examples.starter_model.tokenizer import train_tokenizer
from trainer.policy.proof_on_copy import randomize

WORDS = 512
"""Entries of the vocabulary besides the tokens of images."""
CONTEXT_TOKENS = 2048
_QWEN_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA_WORDS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
_NEWLINES = tuple("\n" * count for count in range(1, 5))
"""Single tokens of Gemma, which vLLM's class looks up."""
_GEMMA_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<start_of_image>{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "vocab_size": WORDS + 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
}
_PATCHES = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_TOWER = {
    **_PATCHES,
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": _TEXT["hidden_size"],
}


def qwen3_vl(folder: Path) -> None:
    """`Qwen3VLForConditionalGeneration` with one deep-stack layer."""
    tokens = _tokenizer(_QWEN_WORDS)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={
            **_TEXT,
            "num_hidden_layers": 2,
            "rope_parameters": {**rope, "mrope_section": [6, 5, 5]},
        },
        vision_config={**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
        **_qwen_ids(tokens),
    )
    _save(config, _qwen_processor(tokens, "qwen3_vl.jinja"), folder)


def qwen3_5(folder: Path) -> None:
    """`Qwen3_5ForConditionalGeneration`: three layers of Gated DeltaNet and one of attention."""
    tokens = _tokenizer(_QWEN_WORDS)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
    config = Qwen3_5Config(
        text_config={
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        vision_config=_QWEN_TOWER,
        tie_word_embeddings=False,
        **_qwen_ids(tokens),
    )
    _save(config, _qwen_processor(tokens, "qwen3_5_think.jinja"), folder)


def gemma3(folder: Path) -> None:
    """`Gemma3ForConditionalGeneration`: an image is 16 tokens, which see each other."""
    names = ("boi_token", "eoi_token", "image_token")
    tokens = _tokenizer(_GEMMA_WORDS, **dict(zip(names, _GEMMA_WORDS, strict=True)))
    start, end, image = tokens.convert_tokens_to_ids(list(_GEMMA_WORDS))
    config = Gemma3Config(
        text_config={
            **_TEXT,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=image,
        tie_word_embeddings=True,
    )
    images = Gemma3ImageProcessor(size={"height": 64, "width": 64}, image_seq_length=16)
    _save(config, Gemma3Processor(images, tokens, _GEMMA_TEMPLATE, image_seq_length=16), folder)
    # transformers 5.19 writes the tower without a level that published checkpoints and vLLM have.
    file = folder / "model.safetensors"
    named = load_file(file)
    tower = "vision_tower."
    save_file(
        {name.replace(tower, tower + "vision_model."): named[name] for name in named},
        file,
        metadata={"format": "pt"},
    )


def published_template(name: str) -> str:
    """A chat template of a published model, from TRL's files."""
    package = find_spec("trl")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("chat_templates").joinpath(name).read_text("utf-8")


MODELS: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5, "gemma3": gemma3}
)


def _tokenizer(words: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """`named`: attributes of the tokenizer that its processor reads."""
    tokens = train_tokenizer([__doc__ or ""], WORDS)
    tokens.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    if words == _GEMMA_WORDS:
        tokens.add_tokens([AddedToken(word, normalized=False) for word in _NEWLINES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_TOKENS,
        extra_special_tokens=named,
    )


def _qwen_ids(tokens: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("vision_start", "vision_end", "image", "video")
    ids = tokens.convert_tokens_to_ids(list(_QWEN_WORDS))
    return {f"{name}_token_id": value for name, value in zip(names, ids, strict=True)}


def _qwen_processor(tokens: PreTrainedTokenizerFast, template: str) -> Qwen3VLProcessor:
    size = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes, **normal),
        tokens,
        Qwen3VLVideoProcessor(**sizes, **normal),
        chat_template=published_template(template),
    )


def _save(config: Any, processor: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model)
    end, padding = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    processor.save_pretrained(folder)
    save_model(model, folder, end_of_turn=end, padding=padding)
