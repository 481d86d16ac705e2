"""In which floating-point type a checkpoint is: the default of `model.compute_dtype`.

`config.json` says it (`dtype`, formerly `torch_dtype`), as transformers and vLLM read it; where it
does not, the headers of the weights do. A checkpoint of any narrower type than float32 (float16,
float8, …) is computed in bfloat16.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

ComputeDtype = Literal["float32", "bfloat16"]
WIDE = frozenset({"float32", "float64", "F32", "F64"})
NOT_FLOATING = frozenset({"BOOL", "I16", "I32", "I64", "U16", "U32", "U64"})
HELD = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
"""Types, as safetensors names them, of weights that are trained, and of buffers."""
HEADER_BYTES = 100 * 2**20
"""The longest header that safetensors itself reads."""


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


def checkpoint_type(path: Path) -> ComputeDtype:
    """The type in which a checkpoint is computed by default; float32 if nothing says its type."""
    name = _configured(path / "config.json") or _most_common(path) or "float32"
    return "float32" if name in WIDE else "bfloat16"


def other_type(path: Path) -> tuple[str, str] | None:
    """The first weight of a type in which none is trained or exported (float8), and its type."""
    for file in weight_files(path):
        for name, tensor in _header(file).items():
            if "data_offsets" in tensor and (kind := str(tensor.get("dtype"))) not in HELD:
                return name, kind
    return None


def _configured(file: Path) -> str | None:
    """The type that `config.json` gives for the model, or for its text part."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the model is checked
        return None
    return next(_dtypes(settings), None)


def _dtypes(settings: Any) -> Iterator[str]:
    if not isinstance(settings, Mapping):
        return
    for key in ("dtype", "torch_dtype"):
        if isinstance(value := settings.get(key), str) and value != "auto":
            yield value.removeprefix("torch.")
    yield from _dtypes(settings.get("text_config"))


def _most_common(path: Path) -> str | None:
    """The type of most bytes of the weights."""
    sizes = Counter[str]()
    for file in weight_files(path):
        for tensor in _header(file).values():
            if "data_offsets" in tensor and tensor.get("dtype") not in NOT_FLOATING:
                begin, end = tensor["data_offsets"]
                sizes[str(tensor["dtype"])] += end - begin
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: 8 bytes with its length, then JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, HEADER_BYTES)))
    except (OSError, ValueError):  # reported when the weights are loaded
        return {}
    return header if isinstance(header, dict) else {}
