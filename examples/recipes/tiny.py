"""Makes a tiny checkpoint of the class of each recipe's model, with random weights.

    python -m examples.recipes.tiny --packages DIR --out DIR     (benchmarks.install runs this)

Everything that is not a size is that of the published model: class, kinds of layers, head sizes of
Gated DeltaNet, names of tensors, Qwen3's vocabulary of 151,669 tokens, and the chat template. The
vocabulary is a file of the package `dashscope`, the templates are files of `trl`; `DIR` is a folder
in which both are installed. Qwen3.5 has a larger vocabulary, which no package has: its tiny
checkpoint has Qwen3's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from examples.recipes.published import qwen3_5_4b, qwen3_8b, qwen3_vl_4b
from examples.recipes.vocabulary import CONTROL_WORDS, qwen_tokenizer
from examples.starter_model.checkpoint import save_model
from examples.starter_model.tokenizer import save_tokenizer
from trainer.policy.proof_on_copy import randomize

_FIRST_CONTROL_WORD = 151643
_ENDS = ("<|im_end|>", "<|endoftext|>")
_VISION_WORDS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 151936}


def tiny_qwen3(folder: Path) -> None:
    """A `Qwen3ForCausalLM` of two layers."""
    settings = qwen3_8b()
    _set(settings, _WIDTHS, num_attention_heads=2, num_key_value_heads=1, **_first(settings, 2))
    _save(AutoModelForCausalLM.from_config(settings), folder)


def tiny_qwen3_vl(folder: Path) -> None:
    """A `Qwen3VLForConditionalGeneration` of two layers, with a tower of two."""
    settings = qwen3_vl_4b()
    text = settings.text_config
    _set(text, _WIDTHS, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    _small_tower(settings, depth=2, deepstack_visual_indexes=[0])
    _save(AutoModelForImageTextToText.from_config(settings), folder)
    _save_processor(folder)


def tiny_qwen3_5(folder: Path) -> None:
    """A `Qwen3_5ForConditionalGeneration` of three layers of Gated DeltaNet and one of attention,
    with a vision tower of one layer."""
    settings = qwen3_5_4b()
    text = settings.text_config
    few = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    _set(text, _WIDTHS | few, num_attention_heads=2, num_key_value_heads=1, **_first(text, 4))
    _small_tower(settings, depth=1)
    _save(AutoModelForImageTextToText.from_config(settings), folder)
    _save_processor(folder)


MODELS: Mapping[str, tuple[Callable[[Path], None], str]] = MappingProxyType(
    {
        "qwen3-8b": (tiny_qwen3, "qwen3.jinja"),
        "qwen3-vl-4b": (tiny_qwen3_vl, "qwen3_vl.jinja"),
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


def _small_tower(settings: Any, **more: Any) -> None:
    """Its tokens are those of Qwen3's vocabulary."""
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    _set(settings.vision_config, tower, out_hidden_size=_WIDTHS["hidden_size"], **more)
    for name, word in _VISION_WORDS.items():
        setattr(settings, f"{name}_token_id", _FIRST_CONTROL_WORD + CONTROL_WORDS.index(word))


def _save_processor(folder: Path) -> None:
    """What the published folder says of its images."""
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kinds = {
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
        },
        "video_preprocessor": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"longest_edge": 25_165_824, "shortest_edge": 4_096},
        },
    }
    for file, kind in kinds.items():
        text = json.dumps(
            {"processor_class": "Qwen3VLProcessor", **kind, **sizes, **normal}, indent=2
        )
        (folder / f"{file}_config.json").write_text(text + "\n", encoding="utf-8")


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
