"""How a model in training reads images, and what its rows hold for an image.

Invariant: a rollout with images is trained on the pixels that the engine had, or not at all: a
model that does not read them, an image whose bytes are missing, and pixels with another digest than
the recorded one end the step.

Shapes: `T` tokens of a row, `L` of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from proxy.errors import ImageError
from proxy.records import ImageSpan
from proxy.records.images import check_images
from proxy.settings.late_section import load_extra
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.policy.towers import READERS
from trainer.rows.images import Counts
from trainer.rows.packing import MicroBatch, Positions, counted


class ImageReader(Protocol):
    """The tower of a model with its processor.

    Example:
        reader.read(batch)  # pixels, and the features of each image, once
        decoder(**reader.inputs(micro))
        reader.backward()  # if the tower is trained
    """

    @property
    def tower(self) -> nn.Module: ...

    @property
    def trained(self) -> bool:
        """Whether the tower is trained."""
        ...

    @property
    def whole_images(self) -> bool:
        """Whether the tokens of an image see each other."""
        ...

    def positions(self, tokens: int, images: Sequence[ImageSpan]) -> Counts:
        """The model's own positions of a sequence, `[3, L]` or `[L]`."""
        ...

    def read(self, batch: Batch) -> None:
        """Computes the features of the batch's images, as far as it has not.

        Raises TrainingError, which names the image: its bytes are missing, or its pixels are not
        those that the engine had.
        """
        ...

    def inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """What the decoder gets in place of the ids of a row with images."""
        ...

    def backward(self) -> None:
        """Adds the gradient of the tower, from those of the features that rows had since the last
        step."""
        ...

    def forget(self) -> None:
        """Forgets the features, because the tower has changed."""
        ...


def reader_of(model: Any) -> ImageReader | None:
    """The reader of a loaded model; None if it is trained as a text model."""
    reader: ImageReader | None = getattr(model, "image_reader", None)
    return reader


def add_reader(model: Any, path: Path, dtype: torch.dtype, *, trained: bool) -> None:
    """Gives the model of the checkpoint at `path`, which computes in `dtype`, its reader.

    Raises ConfigError, if it cannot prepare images."""
    kind = load_extra(READERS[model.config.model_type])
    model.image_reader = kind(model, path, dtype, trained=trained)


def positions_of(model: Any) -> Positions:
    """How the positions of the model's sequences are counted."""
    reader = reader_of(model)
    return counted if reader is None else reader.positions


def with_masks(model: Any, micros: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches with the model's own mask of their images."""
    reader = reader_of(model)
    if reader is None or not reader.whole_images:
        return micros
    return [
        micro
        if micro.images is None
        else replace(micro, layout=replace(micro.layout, images=micro.images.row(len(micro.ids))))
        for micro in micros
    ]


def check_batch(model: Any, batch: Batch) -> None:
    """Raises TrainingError, which names rollout and image: image tokens are not those of the
    batch's images, or the model is trained as a text model."""
    reads = reader_of(model) is not None
    for index, ids in enumerate(batch.sequences):
        images = batch.images_of(index)
        try:
            check_images(ids, images)
        except ImageError as error:
            raise TrainingError(f"{_rollout(batch, index)}: {error}") from error
        if images and not reads:
            raise TrainingError(
                f"{_rollout(batch, index)}: image {images[0].sha256[:12]}: the model is trained "
                "as a text model; set model.vision=frozen or trained"
            )


def _rollout(batch: Batch, sequence: int) -> str:
    return f"rollout {batch.trial_ids[int(batch.sequence_rollout[sequence])]}"
