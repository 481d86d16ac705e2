"""The size that an image claims, against Pillow, which decodes images in the engine and the
trainer."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from typing import Any

import pytest
from PIL import Image

from proxy.wire.image_header import pixels

KINDS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
SIZE = (70, 41)


def drawn(kind: str, mode: str = "RGB", size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert(mode).save(file, kind, **options)
    return file.getvalue()


EXIF = Image.Exif()
EXIF[0x010E] = "a description " * 40
FILES = {
    "png": ("PNG", drawn("PNG")),
    "png, palette, bits": ("PNG", drawn("PNG", "P", bits=4)),
    "png, text before the pixels": ("PNG", drawn("PNG", "RGBA", dpi=(3, 3), exif=EXIF)),
    "png, several frames": (
        "PNG",
        drawn("PNG", save_all=True, append_images=[Image.new("RGB", (5, 5))]),
    ),
    "jpeg": ("JPEG", drawn("JPEG")),
    "jpeg, progressive": ("JPEG", drawn("JPEG", progressive=True, exif=EXIF)),
    "jpeg, grey": ("JPEG", drawn("JPEG", "L", comment=b"\xff\xc0 in a comment")),
    "jpeg, restarts": ("JPEG", drawn("JPEG", "CMYK", restart_marker_rows=1)),
    "gif": ("GIF", drawn("GIF", "P", comment=b"a comment")),
    "gif, several frames": (
        "GIF",
        drawn("GIF", "P", save_all=True, append_images=[Image.new("P", SIZE, 3)], loop=0),
    ),
    "webp": ("WEBP", drawn("WEBP")),
    "webp, lossless": ("WEBP", drawn("WEBP", "RGBA", lossless=True)),
    "webp, extended": ("WEBP", drawn("WEBP", "RGBA", exif=EXIF)),
    "webp, several frames": (
        "WEBP",
        drawn("WEBP", save_all=True, append_images=[Image.new("RGB", SIZE)]),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_size_is_that_of_the_decoder(name: str) -> None:
    kind, data = FILES[name]
    assert pixels(data, KINDS[kind]) == SIZE[0] * SIZE[1]


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def header(size: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0))


def test_second_header_of_a_png_counts() -> None:
    """Pillow takes the last one."""
    start = b"\x89PNG\r\n\x1a\n"
    ends = chunk(b"IDAT", zlib.compress(bytes(3000))) + chunk(b"IEND", b"")
    data = start + header(10) + chunk(b"tEXt", b"a\0b") + header(9000) + ends
    assert Image.open(io.BytesIO(data)).size == (9000, 9000)
    assert pixels(data, "image/png") == 9000**2


def frame(size: int) -> bytes:
    return b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, size, size, 1) + b"\x01\x11\x00"


def test_last_and_hidden_frames_of_a_jpeg_count() -> None:
    """Behind bytes that are no marker, and behind fill bytes."""
    table = b"\xff\xe0" + struct.pack(">H", 6) + b"\xff\xc0\xff\xff"
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    data = b"\xff\xd8" + frame(8) + table + b"\x01\x02" + b"\xff\xff" + frame(9000) + scan
    assert pixels(data, "image/jpeg") == 9000**2
    assert pixels(b"\xff\xd8" + frame(8) + scan + frame(9000), "image/jpeg") == 64


def test_frame_enlarges_the_screen_of_a_gif() -> None:
    data = bytearray(drawn("GIF", "P", size=(10, 10)))
    at = data.index(b"\x2c\0\0\0\0")
    data[at + 1 : at + 9] = struct.pack("<HHHH", 5000, 6000, 10, 10)
    assert Image.open(io.BytesIO(data)).size == (5010, 6010)
    assert pixels(bytes(data), "image/gif") == 5010 * 6010


@pytest.mark.parametrize("kind", KINDS)
def test_image_without_a_size_is_refused(kind: str) -> None:
    data = dict(FILES.values())[kind]
    with pytest.raises(ValueError, match="without a size"):
        pixels(data[:12], KINDS[kind])


@pytest.mark.parametrize("name", FILES)
def test_no_damaged_image_is_larger_than_it_seems(name: str) -> None:
    """The decoder refuses it, or its size is at most what was read."""
    kind, data = FILES[name]
    rng = random.Random(name)
    opened = 0
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(8, min(len(data), rng.choice((40, 200, 2000))))
            if rng.random() < 0.6:
                damaged[at] = rng.choice((0, 0xFF, 0xC0, 0xD8, 0x2C, 0x21, rng.randrange(256)))
            else:
                start = rng.randrange(8, len(data))
                damaged[at:at] = data[start : start + rng.randint(1, 60)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images and damaged EXIF data
            try:
                image = Image.open(io.BytesIO(damaged), formats=[kind])
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
                continue
        opened += 1
        try:
            claimed = pixels(bytes(damaged), KINDS[kind])
        except ValueError:
            continue
        assert image.size[0] * image.size[1] <= claimed, bytes(damaged).hex()
    assert opened > 30
