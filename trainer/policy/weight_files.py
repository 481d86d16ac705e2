"""The files of a checkpoint folder that hold its weights."""

from __future__ import annotations

import json
from pathlib import Path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers and vLLM load: `model.safetensors`, or those that the
    index names. Others, such as Mistral's `consolidated.safetensors`, hold the same weights under
    other names. Without either, all; none if there is no such file."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # reported when it is loaded
        return sorted(folder.glob("*.safetensors"))
    return [file for name in named if (file := folder / name).is_file()]
