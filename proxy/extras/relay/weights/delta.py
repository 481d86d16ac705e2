"""What changed between two versions of a tensor, exactly: positions, and old bits XOR new bits.

After rounding to bfloat16 most elements of a step of RL are what they were before, and of those
that changed most differ in the last bits. A change is stored as the distance to the change before
it, in one or two bytes, and the XOR; a longer distance becomes several, with an XOR of 0. Both are
compressed with zlib, the XORs byte by byte of an element, because the upper ones are mostly 0.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

Bits = np.ndarray[Any, np.dtype[Any]]
"""A tensor's elements as unsigned integers of their size, in one dimension."""

CHUNK = 1 << 22
"""Number of elements that are compared at a time: 8 MiB of bfloat16 and 32 MiB of positions."""
_LEVEL = 1  # higher levels take several times as long and save a few percent
_HEAD_BYTES = 9


def changes(old: Bits, new: Bits) -> bytes | None:
    """What `apply` needs to make `new` of `old`; None: nothing changed. May be larger than `new`,
    if most of it changed."""
    xor = np.bitwise_xor(old, new)
    (positions,) = np.nonzero(xor)
    if not len(positions):
        return None
    gaps = np.diff(positions, prepend=-1)
    width = min((1, 2), key=lambda each: (len(gaps) + _fillers(gaps, each)) * (each + xor.itemsize))
    most = (1 << 8 * width) - 1
    repeats = (gaps - 1) // most
    ends = np.cumsum(repeats + 1) - 1  # where each change lies among the fillers before it
    stored = np.full(int(ends[-1]) + 1, most, f"<u{width}")
    stored[ends] = gaps - most * repeats
    values = np.zeros(len(stored), xor.dtype)
    values[ends] = xor[positions]
    planes = values.astype(xor.dtype.newbyteorder("<")).view(np.uint8).reshape(len(values), -1).T
    body = zlib.compress(stored.tobytes() + planes.tobytes(), _LEVEL)
    return bytes([width]) + len(stored).to_bytes(8, "little") + body


def apply(stored: bytes | memoryview, bits: Bits) -> None:
    """Changes `bits` from the old to the new elements.

    Raises:
        ValueError: these are not changes of so many elements of this size.
    """
    if len(stored) < _HEAD_BYTES:
        raise ValueError(f"{len(stored)} bytes of changes")
    width, count = stored[0], int.from_bytes(stored[1:_HEAD_BYTES], "little")
    size = count * (width + bits.itemsize)
    if width not in (1, 2) or not 0 < count <= len(bits):
        raise ValueError(f"{count} changes of {len(bits)} elements, with {width} bytes each")
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(stored[_HEAD_BYTES:], size + 1)
    except zlib.error as error:
        raise ValueError(f"changes that cannot be decompressed: {error}") from error
    if len(body) != size:
        raise ValueError(f"{len(body)} bytes of changes, expected {size}")
    gaps = np.frombuffer(body, f"<u{width}", count)
    planes = np.frombuffer(body, np.uint8, offset=count * width).reshape(bits.itemsize, count)
    values = np.ascontiguousarray(planes.T).view(f"<u{bits.itemsize}").reshape(count)
    positions = np.cumsum(gaps, dtype=np.int64) - 1
    if gaps.min() < 1 or positions[-1] >= len(bits):
        raise ValueError(f"a change of element {positions[-1]} of {len(bits)}")
    bits[positions] ^= values


def _fillers(gaps: Bits, width: int) -> int:
    return int(((gaps - 1) // ((1 << 8 * width) - 1)).sum())
