"""How many pixels an image claims to have, read from its headers alone.

A few kilobytes can claim a billion pixels, which a decoder makes room for. Nothing is decoded here.
Where a file claims several sizes, the largest counts, whichever of them its decoder would take.
"""

from __future__ import annotations

_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of frames. The others of this range are tables."""
_JPEG_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))
"""Markers without a length."""


def pixels(data: bytes, media_type: str) -> int:
    """Width times height of the first frame of a PNG, JPEG, GIF or WebP.

    Raises ValueError: there is no size where the format has it.
    """
    read = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}
    try:
        found = read[media_type](data)
    except IndexError:
        found = 0
    if not found:
        raise ValueError(f"{media_type} without a size")
    return found


def _png(data: bytes) -> int:
    """Up to the pixels, each header counts."""
    at, found = 8, 0
    while at + 8 <= len(data):
        length, kind = _big(data, at, 4), data[at + 4 : at + 8]
        if kind == b"IHDR":
            found = max(found, _big(data, at + 8, 4) * _big(data, at + 12, 4))
        if kind in (b"IDAT", b"IEND"):
            break
        at += 12 + length
    return found


def _jpeg(data: bytes) -> int:
    """Up to the first scan, each frame counts. What is no marker is skipped, as decoders do."""
    at, found = 2, 0
    while (at := data.find(b"\xff", at)) >= 0:
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _JPEG_ALONE:
            continue
        if marker == 0xDA:
            break
        if marker in _JPEG_SIZES:
            found = max(found, _big(data, at + 3, 2) * _big(data, at + 5, 2))
        at += _big(data, at, 2)
    return found


def _gif(data: bytes) -> int:
    """Its screen, enlarged by the first frame."""
    wide, high = _little(data, 6, 2), _little(data, 8, 2)
    at = 13 + _colours(data[10])
    while data[at] != 0x2C:  # an image
        if data[at] != 0x21:  # an extension
            at += 1
            continue
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    left, top, *size = (_little(data, at + n, 2) for n in (1, 3, 5, 7))
    return max(wide, left + size[0]) * max(high, top + size[1])


def _colours(flags: int) -> int:
    """Bytes of a table of colours."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes) -> int:
    kind = data[12:16]
    if kind == b"VP8X":
        return (_little(data, 24, 3) + 1) * (_little(data, 27, 3) + 1)
    if kind == b"VP8L":
        bits = _little(data, 21, 4)
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return (_little(data, 26, 2) & 0x3FFF) * (_little(data, 28, 2) & 0x3FFF)


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_bytes(data, at, size), "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_bytes(data, at, size), "little")


def _bytes(data: bytes, at: int, size: int) -> bytes:
    found = data[at : at + size]
    if len(found) < size:
        raise IndexError
    return found
