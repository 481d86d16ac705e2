"""A process that renders one document: a PDF on its input, PNGs on its output, each after its
length. It may use one minute of processor time and 2 GiB of memory, and open no file."""

from __future__ import annotations

import resource
import struct
import sys
import zlib

import numpy as np
import pypdfium2

from proxy.extras.pdf_pages.pages import LENGTH, LONGEST_EDGE, MAX_PAGES

MEMORY_BYTES = 2 * 2**30
PROCESSOR_S = 60
NO_FILES = 0


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (NO_FILES, NO_FILES))
    document = pypdfium2.PdfDocument(sys.stdin.buffer.read())
    out = sys.stdout.buffer
    out.write(LENGTH.pack(len(document)))
    for number in range(min(len(document), MAX_PAGES)):
        page = document[number]
        scale = LONGEST_EDGE / max(*page.get_size(), 1)
        pixels = page.render(scale=scale, may_draw_forms=False, rev_byteorder=True).to_numpy()
        data = png(np.ascontiguousarray(pixels[:, :, :3]))
        out.write(LENGTH.pack(len(data)) + data)
    out.flush()


def png(pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> bytes:
    """`pixels`: `[height, width, 3]`."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


if __name__ == "__main__":
    main()
