"""The images of a prompt, as vLLM takes and gives them.

An engine prepares an image with the model's own processor (`POST RENDER`), and takes what it made
with the ids of a prompt (`features`). vLLM does not check `features`: it answers with a wrong span,
with a missing one, or with the pixels of another image, and a span that is one token too long ends
it (docs/notes/images.md). Invariants: what is built here has exactly the images of the prompt; two
preparations have the same digest exactly if all of their tensors are equal, whatever the order in
which the engine lists them; and no request has more than BODY_BYTES of images, unless it is one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.engines.protocol import PreparedImage
from proxy.errors import EngineError
from proxy.records import ImageSpan

RENDER = "/v1/chat/completions/render"
GRID = "image_grid_thw"
"""Of Qwen's models: rows of patches in time, height and width, for the positions of the tokens."""
PROBE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAJklEQVR42u3NMQ0AAAwDoEqv9KrYsQQMkB6LQCAQ"
    "CAQCgUAg+BIMLd4AWwUPN68AAAAASUVORK5CYII="
)
"""An image of 32 by 32 pixels, by which it is found out whether an engine prepares images."""

BODY_BYTES = 16 * 2**20
"""Most bytes of images in a request: two screenshots have less. After an engine's restart, a
conversation may lack 200 of 6 MB each, which no body should hold."""
FEW = 2
"""Images that a call brings whatever others do: one has a new picture, or two."""
BRINGING_AT_ONCE = 4
"""Calls that bring more than FEW images to one engine at the same time."""
Items = list[str | None]
"""What an engine made of each image of a prompt; None: it has had the image."""

Tensor = tuple[str, tuple[int, ...], bytes]
"""Type, shape and bytes."""


class _Features(msgspec.Struct):
    kwargs_data: dict[str, list[str | None]] | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_DECODER = msgspec.json.Decoder(_Rendered)


def render_request(model: str | None, data: bytes, media_type: str) -> dict[str, Any]:
    """The body of `RENDER` for one image alone."""
    url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    return body if model is None else {"model": model, **body}


def read_prepared(answer: bytes, token: int) -> PreparedImage:
    """What the engine answered to `render_request`.

    Args:
        token: the id that stands for a part of an image (`image_token_id` of config.json).

    Raises:
        EngineError: 502, the answer has not one image, or no tokens for it.
    """
    try:
        rendered = _DECODER.decode(answer)
        features = rendered.features or _Features()
        (item,) = (features.kwargs_data or {}).get("image") or [None]
        tensors = _tensors(item or "")
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineError(
            f"{RENDER}: the engine's answer for one image is unusable: {error}; it must be vLLM "
            "0.32 with a model that reads images",
            status=502,
        ) from error
    tokens = rendered.token_ids.count(token)
    if item is None or not tokens:
        raise EngineError(
            f"{RENDER}: the engine made {tokens} tokens {token} and "
            f"{'no' if item is None else 'an'} item of one image",
            status=502,
        )
    first = rendered.token_ids.index(token)
    if rendered.token_ids[first : first + tokens] != [token] * tokens:
        raise EngineError(
            f"{RENDER}: the engine writes text into an image, which the proxy does not; set "
            "do_pan_and_scan to false in preprocessor_config.json",
            status=502,
        )
    grid = tensors.get(GRID)
    return PreparedImage(digest_of(tensors), tokens, token, _numbers(grid) if grid else (), item)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """`PreparedImage.digest` of the tensors by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        kind, shape, content = tensors[name]
        digest.update(f"{name} {kind} {shape} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


async def brought(
    images: Sequence[ImageSpan],
    had: set[str],
    item: Callable[[ImageSpan], Awaitable[str]],
    bring: Callable[[int, Items], Awaitable[None]],
) -> Items:
    """Brings the images that an engine has not had before the prompt's own request, if they have
    more than BODY_BYTES. Returns the items for the prompt's own request.

    Args:
        had: the digests of images that the engine has had; those that are brought are added.
        bring: sends the prompt up to the end of its first images, as many as the items that it
            gets, and lets the engine sample a token, which nobody needs. The engine then has these
            images, and the keys and values of this prefix in its cache.
    """
    items: Items = []
    size, is_bringing = 0, False

    async def flush() -> None:
        nonlocal items, size, is_bringing
        await bring(len(items), items)
        had.update(span.digest for span in images[: len(items)])
        items, size, is_bringing = [None] * len(items), 0, True

    for span in images:
        made = None if span.digest in had else await item(span)
        if made is not None and size and size + len(made) > BODY_BYTES:
            await flush()
            made = None if span.digest in had else made
        items.append(made)
        size += len(made or "")
    if is_bringing and size:
        await flush()
    return items


def features(images: Sequence[ImageSpan], items: Sequence[str | None]) -> dict[str, Any]:
    """The field `features` of a request.

    Args:
        items: what an engine made of each image; None: this engine has had it.
    """
    places = [{"offset": image.offset, "length": image.tokens} for image in images]
    return {
        "mm_hashes": {"image": [image.digest for image in images]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": list(items)},
    }


def check_echo(images: Sequence[ImageSpan], echoed: Mapping[str, Any] | None) -> None:
    """`echoed`: the field `mm_placeholders` of the answer to a request with `return_token_ids`.

    Raises EngineError: 502, the engine has other images than it was sent, or none.
    """
    sent = [(image.offset, image.tokens) for image in images]
    found = [(each["offset"], each["length"]) for each in (echoed or {}).get("image", ())]
    if found != sent:
        raise EngineError(
            f"the engine was sent images at {sent} (offset, tokens), but answered with images at "
            f"{found}; it must be vLLM 0.32 with a model that reads images",
            status=502,
        )


def _tensors(item: str) -> dict[str, Tensor]:
    fields = msgspec.msgpack.decode(base64.b64decode(item), ext_hook=lambda _, data: bytes(data))
    return {name: _tensor(field["data"]) for name, field in fields.items()}


def _tensor(data: Any) -> Tensor:
    kind, shape, (_, content) = data if isinstance(data[2], list) else (*data[:2], (0, data[2]))
    return str(kind), tuple(shape), bytes(content)


def _numbers(tensor: Tensor) -> tuple[int, ...]:
    kind, _, content = tensor
    width = {"int64": 8, "int32": 4}[kind]
    parts = (content[at : at + width] for at in range(0, len(content), width))
    return tuple(int.from_bytes(part, "little", signed=True) for part in parts)
