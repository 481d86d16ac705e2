"""Image tokens in arrays of ids.

Two images of one size have the same ids in an engine, so equal ids would not be equal prompts. In
a record, the id of an image's token is therefore a number below 0, which is made of the image's
digest and the token's place in the image. Invariant: whatever compares ids compares images, too;
and whatever does not know of images fails, instead of taking an image's tokens for text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from msgspec import structs

from proxy.errors import ImageError
from proxy.records import Ids, ImageSpan


@lru_cache(64)
def image_ids(digest: str, tokens: int) -> Ids:
    """The ids of an image's tokens in a record, `[tokens]`, all below 0.

    Two images differ in each of them, but for one in 2^31.
    """
    stream = hashlib.shake_128(bytes.fromhex(digest)).digest(4 * tokens)
    ids = (np.frombuffer(stream, "<u4") & 0x7FFFFFFF).astype(np.int64)
    return np.asarray(-1 - ids, np.int32)


def engine_ids(ids: Ids, images: Sequence[ImageSpan]) -> Ids:
    """The ids that an engine gets: those of each image are its `token`.

    Args:
        images: the images in `ids`, with offsets in it.

    Raises:
        ImageError: an image is not at its place, or ids below 0 are in no image.
    """
    if not images and (not len(ids) or ids.min() >= 0):
        return ids
    check_images(ids, images)
    out = ids.copy()
    for image in images:
        out[image.offset : image.offset + image.tokens] = image.token
    return out


def check_images(ids: Ids, images: Sequence[ImageSpan]) -> None:
    """Raises ImageError: the ids below 0 are not exactly those of `images`, in this order."""
    found = np.flatnonzero(ids < 0)
    at = 0
    for image in images:
        own = ids[image.offset : image.offset + image.tokens]
        if image.offset < at or not np.array_equal(own, image_ids(image.digest, image.tokens)):
            raise ImageError(
                f"image {image.sha256[:12]}: its {image.tokens} tokens are not at {image.offset} "
                f"of {len(ids)} ids"
            )
        at = image.offset + image.tokens
    tokens = sum(image.tokens for image in images)
    if len(found) != tokens:
        raise ImageError(
            f"{len(found)} ids are tokens of images, but the images that are known have {tokens}"
        )


def found_images(ids: Ids, known: Iterable[ImageSpan]) -> tuple[ImageSpan, ...]:
    """The images in `ids`, each of which is one of `known`.

    Raises ImageError: ids below 0 are not those of whole images.
    """
    by_first = {int(image_ids(each.digest, each.tokens)[0]): each for each in known}
    places = np.flatnonzero(ids < 0).tolist()
    found, at = [], 0
    while at < len(places):
        image = by_first.get(int(ids[places[at]]))
        if image is None:
            raise ImageError(f"the id at {places[at]} of {len(ids)} is of an image that is unknown")
        found.append(structs.replace(image, offset=places[at]))
        at += image.tokens
    check_images(ids, found)
    return tuple(found)


def decoded(ids: Ids, decode: Callable[[list[int]], str], *, hidden: int = 0) -> str:
    """The text of ids for people: `[image 0f3a91c2, 768 tokens]` in the place of an image, where
    another image has another number.

    Args:
        decode: gives the text of ids that are at least 0, or `hidden`.
        hidden: an id that is of no image.
    """
    is_image = (ids < 0) & (ids != hidden)
    cuts = np.flatnonzero(np.diff(is_image)) + 1
    return "".join(
        f"[image {-1 - own[0]:08x}, {len(own)} tokens]" if of_image[0] else decode(own.tolist())
        for own, of_image in zip(np.split(ids, cuts), np.split(is_image, cuts), strict=True)
        if len(own)
    )


def moved(images: Iterable[ImageSpan], by: int) -> tuple[ImageSpan, ...]:
    """The images of ids that begin `by` tokens later."""
    return tuple(structs.replace(each, offset=each.offset + by) for each in images)


def within(images: Iterable[ImageSpan], start: int, end: int) -> tuple[ImageSpan, ...]:
    """The images of `ids[start:end]`, with offsets in it.

    Raises ImageError: an image is only partly in it.
    """
    found = []
    for image in images:
        first, last = image.offset, image.offset + image.tokens
        if last <= start or first >= end:
            continue
        if first < start or last > end:
            raise ImageError(
                f"image {image.sha256[:12]}: tokens [{start}, {end}) cut it at [{first}, {last})"
            )
        found.append(structs.replace(image, offset=first - start))
    return tuple(found)


def uncut(images: Iterable[ImageSpan], end: int) -> int:
    """The largest number of ids, at most `end`, that cuts no image."""
    for image in images:
        if image.offset < end < image.offset + image.tokens:
            return image.offset
    return end
