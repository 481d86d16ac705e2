"""The experts that an engine's router chose, in the form in which they are sent and stored: `.npy`.

vLLM sends an answer's rows as base64 of NumPy's `.npy`; stores, records and buffers keep the bytes
without base64. Invariant: `load(dump(rows))` equals `rows`, and each row takes `layers × k` bytes
(twice that for models with more than 256 experts).
"""

from __future__ import annotations

import binascii
import io
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from proxy.records import RoutedExperts

MAX_EXPERT = 2**16 - 1
_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


def dump(rows: RoutedExperts | None) -> bytes | None:
    """`rows` as `.npy`; None stays None."""
    if rows is None:
        return None
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(rows), allow_pickle=False)
    return file.getvalue()


def load(data: bytes | None) -> RoutedExperts | None:
    """The rows of `.npy` bytes: a read-only view of them, unless their type is wider than needed.

    Raises ValueError: the bytes are not an array `[R, layers, k]` of experts.
    """
    if data is None:
        return None
    file = io.BytesIO(data)
    version = npy.read_magic(file)  # type: ignore[no-untyped-call]
    if version not in _HEADERS:
        raise ValueError(f"version {version} of .npy")
    shape, in_columns, dtype = _HEADERS[version](file)
    if len(shape) != 3 or in_columns or dtype.kind not in "iu":
        raise ValueError(f"an array {dtype} of the shape {list(shape)}")
    rows: npt.NDArray[Any] = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    if dtype in (np.uint8, np.dtype("<u2")):
        return rows
    if rows.size and not 0 <= rows.min() <= rows.max() <= MAX_EXPERT:
        raise ValueError(f"an expert outside of 0 to {MAX_EXPERT}")
    if not rows.size or rows.max() < 256:
        return rows.astype(np.uint8)
    return rows.astype(np.uint16)


def dump_text(rows: RoutedExperts) -> str:
    """`rows` as base64 of `.npy`."""
    return b64encode(dump(rows) or b"").decode()


def load_text(text: str) -> RoutedExperts:
    """The rows of base64 of `.npy`. Raises ValueError, as `load`."""
    try:
        data = b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    rows = load(data)
    assert rows is not None
    return rows
