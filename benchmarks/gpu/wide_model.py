"""python -m benchmarks.gpu.wide_model --out DIR: a model of 1.4 B random weights in bfloat16.

The layers are those of Qwen3-1.7B; vocabulary and tokenizer are the quickstart's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

STARTER = Path("examples/quickstart/model")
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wide_model", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    shutil.copytree(
        STARTER, given.out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    torch.manual_seed(0)
    with torch.device(given.device):
        model = AutoModelForCausalLM.from_config(wide(), dtype=torch.bfloat16)
    model.save_pretrained(given.out)


def wide() -> Any:
    """The configuration of the starter model with Qwen3-1.7B's layers."""
    settings = AutoConfig.from_pretrained(STARTER)
    for name, value in SHAPE.items():
        setattr(settings, name, value)
    settings.layer_types = ["full_attention"] * SHAPE["num_hidden_layers"]
    return settings


if __name__ == "__main__":
    main()
