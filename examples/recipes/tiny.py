"""Makes a tiny checkpoint of the class of each recipe's model, with random weights.

    python -m examples.recipes.tiny --packages DIR --out DIR     (make recipes)

Everything that is not a size is that of the published model: class, kinds of layers, head sizes of
Gated DeltaNet, names of tensors, Qwen3's vocabulary of 151,669 tokens, and the chat template. The
vocabulary is a file of the package `dashscope`, the templates are files of `trl`; `DIR` is a folder
in which both are installed. Qwen3.5 has a larger vocabulary, which no package has: its tiny
checkpoint has Qwen3's.
"""

from __future__ import annotations

import argparse
import base64
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from examples.recipes.published import qwen3_5_4b, qwen3_8b
from examples.starter_model.checkpoint import save_model
from examples.starter_model.tokenizer import save_tokenizer, train_tokenizer
from trainer.policy.proof import randomize

CONTROL_WORDS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""In the order of their ids, which follow those of the vocabulary's file."""
_TEXT = frozenset(CONTROL_WORDS[14:])
"""Control words that are text: `skip_special_tokens` does not hide them."""
_FIRST_CONTROL_WORD = 151643
_ENDS = ("<|im_end|>", "<|endoftext|>")
_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 151936}


def tiny_qwen3(folder: Path) -> None:
    """A `Qwen3ForCausalLM` of two layers."""
    settings = qwen3_8b()
    _set(settings, _WIDTHS, num_attention_heads=2, num_key_value_heads=1, **_first(settings, 2))
    _save(AutoModelForCausalLM.from_config(settings), folder)


def tiny_qwen3_5(folder: Path) -> None:
    """A `Qwen3_5ForConditionalGeneration` of three layers of Gated DeltaNet and one of attention,
    with a vision tower of one layer."""
    settings = qwen3_5_4b()
    text = settings.text_config
    few = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    _set(text, _WIDTHS | few, num_attention_heads=2, num_key_value_heads=1, **_first(text, 4))
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    _set(settings.vision_config, tower, out_hidden_size=text.hidden_size)
    _save(AutoModelForImageTextToText.from_config(settings), folder)


MODELS: Mapping[str, tuple[Callable[[Path], None], str]] = MappingProxyType(
    {
        "qwen3-8b": (tiny_qwen3, "qwen3.jinja"),
        "qwen3.5-4b": (tiny_qwen3_5, "qwen3_5_think.jinja"),
    }
)
"""The recipe's model → what makes its checkpoint, and the chat template of the published one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = qwen_tokenizer(given.packages / "dashscope/resources/qwen.tiktoken")
    for name, (make, template) in MODELS.items():
        folder = given.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        make(folder)
        save_tokenizer(tokenizer, folder, 32768)
        templates = given.packages / "trl/chat_templates"
        shutil.copyfile(templates / template, folder / "chat_template.jinja")
        print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) >> 20} MiB")


def qwen_tokenizer(file: Path) -> Tokenizer:
    """Qwen3's tokenizer, from a file with a line `BASE64 RANK` for each token."""
    lines = (line.split() for line in file.read_bytes().splitlines())
    tokenizer = byte_pairs({base64.b64decode(token): int(rank) for token, rank in lines})
    splits = train_tokenizer([], 512)  # text as Qwen's tokenizers do
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(tokenizer, part, getattr(splits, part))
    for word in CONTROL_WORDS:
        token = AddedToken(word, special=word not in _TEXT, normalized=False)
        add = tokenizer.add_tokens if word in _TEXT else tokenizer.add_special_tokens
        add([token])
    return tokenizer


def byte_pairs(ranks: Mapping[bytes, int]) -> Tokenizer:
    """A tokenizer without rules for splitting, from the ids of its tokens' bytes."""
    spelled = _letters_of_bytes()

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [_parts(token, ranks) for token in ranks if len(token) > 1]
    return Tokenizer(BPE(vocabulary, [(spell(one), spell(two)) for one, two in merges]))


def _letters_of_bytes() -> list[str]:
    """Byte-level BPE spells each byte as a visible letter: 0x20 as `Ġ`."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return [chr(byte if byte in visible else 0x100 + others.index(byte)) for byte in range(0x100)]


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that are merged into this one: what merges of lower ranks leave of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(one + two, len(ranks)) for one, two in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _first(settings: Any, layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "layer_types": settings.layer_types[:layers]}


def _set(settings: Any, values: Mapping[str, Any], **more: Any) -> None:
    for name, value in {**values, **more}.items():
        setattr(settings, name, value)


def _save(model: Any, folder: Path) -> None:
    randomize(model)
    end, padding = (_FIRST_CONTROL_WORD + CONTROL_WORDS.index(word) for word in _ENDS)
    save_model(model, folder, end_of_turn=end, padding=padding)


if __name__ == "__main__":
    main()
