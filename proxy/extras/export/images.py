"""The images of exported sessions.

A row holds them as `RecordedImage`s, which become a data URL in JSON, and in Parquet and datasets
the struct of bytes and path that Hugging Face `datasets` reads as an image. Invariant: an exported
session has all of its images as the agent sent them; a session whose images a format cannot hold
is left out, with a reason that says so.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from proxy.conversation.images import parts
from proxy.conversation.messages import Message
from proxy.errors import ImageError
from proxy.extras.export.protocol import ExportFormat, ImagesFound, Row, Sample
from proxy.records import Ids, RecordedImage
from proxy.records.images import engine_ids
from proxy.token_tree.sampled_paths import SampledPath

READ_BY = ("user", "tool")
"""Roles whose messages have images."""


class ImageSource(Protocol):
    """A store, or anything with this method of a store."""

    async def get_image(self, sha256: str) -> RecordedImage | None: ...


async def with_images(
    units: AsyncIterator[Sequence[Sample]],
    form: ExportFormat,
    source: ImageSource,
    left_out: Counter[str],
) -> AsyncIterator[Sequence[Sample]]:
    """The units with the bytes of their images; without those that the format has no place for.

    Raises:
        ImageError: an image is not in the store.
    """
    why = getattr(form, "no_images", "this format has no place for them")
    async for unit in units:
        if why is not None and any(turn.images for each in unit for turn in each.turns):
            left_out[f"sessions with images: {why}"] += len(unit)
            continue
        yield [await loaded(sample, source) for sample in unit]


async def loaded(sample: Sample, source: ImageSource) -> Sample:
    """The session with the bytes of its images.

    Raises ImageError: an image is not in the store.
    """
    names = {image.sha256 for turn in sample.turns for image in turn.images}
    found: dict[str, RecordedImage] = {}
    for sha256 in sorted(names):
        image = await source.get_image(sha256)
        if image is None:
            raise ImageError(
                f"session {sample.session.session_id!r}: its image {sha256} is not in the store"
            )
        found[sha256] = image
    return replace(sample, images=found) if found else sample


def ids_of_engine(path: SampledPath) -> Ids:
    """`[T]`: the ids of a path, with the model's own id for each token of an image."""
    return engine_ids(path.ids, path.images)


def images_along(sample: Sample, path: SampledPath) -> list[RecordedImage]:
    """The images of a path, as often as each stands in it, in order."""
    return [sample.images[image.sha256] for image in path.images]


def images_of(sample: Sample, messages: Sequence[Message]) -> list[RecordedImage]:
    """The images of messages, as often as each stands in them, in order."""
    return [
        sample.images[sha256]
        for message in messages
        if message.role in READ_BY
        for _, sha256 in parts(message.text)
        if sha256
    ]


def refuse_images(form: Any, samples: Sequence[Sample]) -> None:
    """Raises ImagesFound if a format that has not been told so gets a session with images."""
    if not form.shows_images and any(sample.images for sample in samples):
        raise ImagesFound


def data_url(image: RecordedImage) -> str:
    return f"data:{image.media_type};base64,{encoded(image)}"


def encoded(image: RecordedImage) -> str:
    """The bytes in base64."""
    return base64.b64encode(image.data).decode()


def as_json(value: Any) -> Any:
    """For orjson: what a row has besides JSON."""
    if isinstance(value, RecordedImage):
        return data_url(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def as_arrow(value: Any) -> Any:
    """The value with `image_type` in the place of each image."""
    if isinstance(value, RecordedImage):
        return {"bytes": value.data, "path": None}
    if isinstance(value, list):
        return [as_arrow(each) for each in value]
    if isinstance(value, dict):
        return {name: as_arrow(each) for name, each in value.items()}
    return value


def image_type(pa: Any) -> Any:
    """The Arrow type of an image."""
    return pa.struct({"bytes": pa.binary(), "path": pa.string()})


def seen_as_images(pa: Any, columns: Row, features: Row) -> Any:
    """The schema of these columns, of which `datasets` reads those in `features` as images."""
    info = orjson.dumps({"info": {"features": features}}).decode()
    return pa.schema(columns, metadata={"huggingface": info})


IMAGE_LIST = {"_type": "List", "feature": {"_type": "Image"}}
"""In the features of `datasets`."""
