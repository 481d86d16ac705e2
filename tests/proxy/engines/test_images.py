"""What an engine makes of an image, and what it is sent of a prompt's images."""

from __future__ import annotations

import base64
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import orjson
import pytest

from proxy.engines.images import (
    BODY_BYTES,
    brought,
    check_echo,
    features,
    read_prepared,
    render_request,
)
from proxy.errors import EngineError
from proxy.records import ImageSpan

TOKEN = 365
GRID = np.array([1, 4, 6], np.int64)
IMAGES = (ImageSpan(1, 2, TOKEN, "a", "…"), ImageSpan(4, 3, TOKEN, "b", "…"))


def item(pixels: bytes, *, grid_first: bool = False) -> str:
    """As vLLM's `encode_mm_kwargs_item` writes it, with the keys in either order."""
    raw = msgspec.msgpack.Ext(3, pixels)
    shape = msgspec.msgpack.Ext(3, GRID.tobytes())
    fields: list[tuple[str, Any]] = [
        ("pixel_values", {"data": ["uint8", [len(pixels)], raw], "field": ["flat", {}]}),
        ("image_grid_thw", {"data": ["int64", [3], shape], "field": ["batched", {}]}),
    ]
    encoded = msgspec.msgpack.encode(dict(reversed(fields) if grid_first else fields))
    return base64.b64encode(encoded).decode()


def answer(content: str | None, tokens: int = 6) -> bytes:
    said = {"mm_hashes": {"image": ["vllm's"]}, "kwargs_data": {"image": [content]}}
    return orjson.dumps({"token_ids": [1, 2, *[TOKEN] * tokens, 3], "features": said})


def test_preparation_is_known_by_its_tensors_alone() -> None:
    one = read_prepared(answer(item(b"one")), TOKEN)
    assert (one.tokens, one.token, one.grid, one.item) == (6, TOKEN, (1, 4, 6), item(b"one"))
    turned = read_prepared(answer(item(b"one", grid_first=True)), TOKEN)
    assert turned.item != one.item
    assert turned.digest == one.digest
    assert read_prepared(answer(item(b"two")), TOKEN).digest != one.digest


@pytest.mark.parametrize(
    "said",
    [
        b"{}",
        b"[]",
        b'{"token_ids": [365], "features": null}',
        answer(None),
        answer("AAAA"),
        answer(item(b"one"), tokens=0),
        b'{"token_ids": [365, 365], "features": {"kwargs_data": {"image": ["", ""]}}}',
        answer(item(b"one")).replace(b"365,365", b"365,7,365", 1),
    ],
)
def test_answer_without_one_image_is_an_error(said: bytes) -> None:
    with pytest.raises(EngineError, match="render"):
        read_prepared(said, TOKEN)


def test_request_holds_one_image_alone() -> None:
    (part,) = render_request("m", b"\x89PNG", "image/png")["messages"][0]["content"]
    assert part["image_url"]["url"] == "data:image/png;base64,iVBORw=="


def test_images_that_an_engine_has_had_are_named_alone() -> None:
    assert features(IMAGES, ["item a", None]) == {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 3}]},
        "kwargs_data": {"image": ["item a", None]},
    }


def test_engine_that_does_not_echo_the_images_is_an_error() -> None:
    body = features(IMAGES, [None, None])
    check_echo(IMAGES, body["mm_placeholders"])
    one_lost = {"image": body["mm_placeholders"]["image"][:1]}
    for echoed in (None, {}, one_lost):
        with pytest.raises(EngineError, match="images at"):
            check_echo(IMAGES, echoed)


class Counted:
    """An engine that has lost all images but `had`, and what it gets."""

    def __init__(self, item_bytes: int, had: set[str]) -> None:
        self.had, self.bodies = had, list[int]()
        self.item_bytes, self.held, self.most_held = item_bytes, 0, 0

    async def item(self, span: ImageSpan) -> str:
        self.held += self.item_bytes
        self.most_held = max(self.most_held, self.held)
        return span.digest * self.item_bytes

    async def bring(self, count: int, items: list[str | None]) -> None:
        assert len(items) == count
        self.got(items)

    def got(self, items: list[str | None]) -> None:
        for span, made in zip(MANY, items, strict=False):
            assert made is not None or span.digest in self.had, "an image that it lacks is named"
            self.had.add(span.digest)
        self.bodies.append(sum(len(made or "") for made in items))
        self.held = 0


MANY = tuple(ImageSpan(4 * n, 3, TOKEN, chr(0x4E00 + n), "…") for n in range(200))


@pytest.mark.parametrize(
    ("item_bytes", "known", "most"),
    [
        (6_300_000, 0, 2),  # 200 screenshots
        (6_300_000, 198, 2),
        (30_000_000, 150, 1),
        (1_000, 0, 200),
    ],
)
async def test_images_that_an_engine_lacks_come_in_bounded_requests(
    item_bytes: int, known: int, most: int
) -> None:
    engine = Counted(item_bytes // 1000, {span.digest for span in MANY[:known]})
    with patch("proxy.engines.images.BODY_BYTES", BODY_BYTES // 1000):
        last = await brought(MANY, set(engine.had), engine.item, engine.bring)
    engine.got(last)
    lacked = len(MANY) - known
    assert max(engine.bodies) == min(most, lacked) * (item_bytes // 1000)
    assert engine.most_held <= (most + 1) * (item_bytes // 1000)
    assert sum(engine.bodies) == lacked * (item_bytes // 1000)
    assert len(last) == len(MANY)
