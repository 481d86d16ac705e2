"""The pages of a PDF, rendered in a process of its own."""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import pytest

from proxy.extras.pdf_pages import pages as rendering
from proxy.extras.pdf_pages.pages import LONGEST_EDGE, MAX_PAGES, pages


def document(*lines: str, box: str = "0 0 200 100") -> bytes:
    """A PDF with a page for each line."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(lines)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(lines)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, line in enumerate(lines):
        text = f"BT /F1 40 Tf 20 40 Td ({line}) Tj ET"
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[{box}]/Contents {5 + 2 * number} 0 R"
            "/Resources<</Font<</F1 3 0 R>>>>>>",
            f"<</Length {len(text)}>>stream\n{text}\nendstream",
        ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj{content} endobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end += f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + end.encode()


def pixels(png: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    width, height = struct.unpack(">II", png[16:24])
    size = struct.unpack(">I", png[33:37])[0]
    rows = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8)
    return rows.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


async def test_each_page_is_a_picture_of_what_it_says() -> None:
    found = await pages(document("One", "Two"))
    assert found is not None
    (first, second), count = found
    assert count == 2
    assert pixels(first).shape == (LONGEST_EDGE // 2, LONGEST_EDGE, 3)
    assert first != second
    assert pixels(first).min() < 50 < 200 < pixels(first).max()
    assert await pages(document("One", "Two")) == found


async def test_long_document_is_cut_and_its_length_is_known() -> None:
    found = await pages(document(*["x"] * (MAX_PAGES + 5), box="0 0 20 20"))
    assert found is not None
    assert (len(found[0]), found[1]) == (MAX_PAGES, MAX_PAGES + 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"%PDF-1.4 nonsense",
        os.urandom(10_000),
        document("x", box="0 0 0 0"),
        document("x", box="0 0 1 100000000"),
    ],
)
async def test_what_cannot_be_rendered_is_none_or_small(data: bytes) -> None:
    found = await pages(data)
    assert found is None or all(max(pixels(page).shape) <= LONGEST_EDGE for page in found[0])


async def test_rendering_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "TIMEOUT_S", 0.0)
    assert await pages(document("One")) is None
