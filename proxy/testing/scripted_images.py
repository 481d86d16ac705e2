"""The images of a scripted engine, which prepares them as vLLM does.

An image of N bytes has 3 to 7 tokens, by N. Its "pixels" are its bytes, so that a test can tell
which image a call had. Unlike vLLM, it notices what is wrong with the images of a call.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from proxy.testing.scripted_wires import ScriptedCall, ScriptedRefusal

PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0 \0\0\0 \x08\x02\0\0\0\xfc\x18\xed\xa3"
"""The beginning of a PNG of 32 by 32 pixels. With more bytes, it is an image of its own here."""
UNREADABLE = b"unreadable"
"""An image with these bytes is refused."""
_RAW = 3
"""vLLM's code of raw data in msgpack."""


class ScriptedImages:
    """See the module."""

    def __init__(self, token: int | None) -> None:
        """`token` is the id for a part of an image; None: the engine reads only text."""
        self.token = token
        self.prepared = 0
        """Number of images that were prepared."""
        self.known: dict[str, str] = {}
        """The items that calls have brought, by name."""
        self.processor = b""
        """Another value is another processor, which makes other pixels of the same bytes."""

    def rendered(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the render route. Raises ScriptedRefusal."""
        if self.token is None:
            raise ScriptedRefusal(400, "At most 0 image(s) may be provided in one prompt.")
        (part,) = body["messages"][0]["content"]
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        if UNREADABLE in data:
            raise ScriptedRefusal(400, "cannot identify image file")
        self.prepared += 1
        tokens, item = tokens_of(data), self.item_of(data)
        return {
            "token_ids": [1, *[self.token] * tokens, 2],
            "features": {"mm_hashes": {"image": ["own"]}, "kwargs_data": {"image": [item]}},
        }

    def item_of(self, data: bytes) -> str:
        """What this engine makes of an image."""
        grid = np.array([1, 2, 2 * tokens_of(data)], np.int64)
        pixels = msgspec.msgpack.Ext(_RAW, self.processor + data)
        shape = msgspec.msgpack.Ext(_RAW, grid.tobytes())
        fields = {
            "pixel_values": {"data": ["uint8", [len(data)], pixels], "field": ["flat", {}]},
            "image_grid_thw": {"data": ["int64", [3], shape], "field": ["batched", {}]},
        }
        return base64.b64encode(msgspec.msgpack.encode(fields)).decode()

    def check(self, call: ScriptedCall) -> None:
        """Raises ScriptedRefusal: 400, the call's images are not those of its ids; 500, it names
        an image that this engine has not had."""
        if call.prompt_ids and min(call.prompt_ids) < 0:
            raise ScriptedRefusal(400, "an id is below 0")
        features = call.features or {}
        places = features.get("mm_placeholders", {}).get("image", [])
        spans = [(each["offset"], each["offset"] + each["length"]) for each in places]
        if any(one[1] > two[0] for one, two in pairwise(spans)):
            raise ScriptedRefusal(400, "mm_placeholders must be non-overlapping and sorted")
        if any(call.prompt_ids[at] != self.token for span in spans for at in range(*span)):
            raise ScriptedRefusal(400, f"the images at {spans} are not image tokens")
        hashes = features.get("mm_hashes", {}).get("image", [])
        items = features.get("kwargs_data", {}).get("image", [])
        for name, item in zip(hashes, items, strict=True):
            if item is None and name not in self.known:
                raise ScriptedRefusal(500, "Internal server error")
            if item is not None:
                self.known.setdefault(name, item)

    def seen(self, call: ScriptedCall) -> list[bytes]:
        """The bytes of the images that the model saw in a call, in order."""
        names = (call.features or {}).get("mm_hashes", {}).get("image", [])
        return [self._bytes_of(self.known[name]) for name in names]

    def _bytes_of(self, item: str) -> bytes:
        hook = lambda _, data: bytes(data)  # noqa: E731
        fields = msgspec.msgpack.decode(base64.b64decode(item), ext_hook=hook)
        data: bytes = fields["pixel_values"]["data"][2]
        return data.removeprefix(self.processor)


def tokens_of(data: bytes) -> int:
    """Number of tokens of an image."""
    return 3 + len(data) % 5
