"""Which tokens of a micro-batch are images.

Invariant: each image token of a row names its image and its place in it, so that a row may have any
part of an image, and an image may stand in several rows. What is there is the image's features,
which are computed once (`trainer.policy.images`).

Shapes: `T` tokens of a row, `I` of them tokens of images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proxy.records import ImageSpan
from trainer.errors import TrainingError
from trainer.transfers import sent

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """The `I` image tokens of a row. An image may stand in it several times, and in parts.

    Example: an image of 2 tokens after one token of text, and its last token once more:
        tokens = [1 2 7]   image = [0 0 0]   part = [0 1 1]   digests = ("4aeb5f…",)
    """

    tokens: Tensor
    """`[I]` int64, index in `[T]`; ascending."""
    image: Tensor
    """`[I]` int64, index in `digests`."""
    part: Tensor
    """`[I]` int64, which of the image's tokens it is."""
    digests: tuple[str, ...]
    """The images of the row (`ImageSpan.digest`)."""

    @classmethod
    def of(cls, image: Counts, part: Counts, digests: Sequence[str]) -> Self | None:
        """Of `image` `[T]`, an index in `digests`, or -1 for text, and `part` `[T]`; None if all
        are text."""
        tokens = np.flatnonzero(image >= 0)
        if not len(tokens):
            return None
        present, index = np.unique(image[tokens], return_inverse=True)
        named = tuple(digests[each] for each in present)
        own = torch.as_tensor(tokens), torch.as_tensor(index), torch.as_tensor(part[tokens])
        return cls(*own, named)

    def row(self, tokens: int) -> Tensor:
        """`[T]` int64: which image of the row each of its `tokens` is of, from 0 on, an image that
        stands there twice counting twice; -1 for text. The row must have whole images."""
        out = torch.full((tokens,), -1)
        out[self.tokens] = (self.part == 0).cumsum(0) - 1
        return out

    def within(self, start: int, stop: int) -> Self | None:
        """Those of the tokens from `start` to before `stop`, as tokens of a row of these."""
        own = ((self.tokens >= start) & (self.tokens < stop)).nonzero()[:, 0]
        if not len(own):
            return None
        chosen = (self.tokens[own] - start, self.image[own], self.part[own])
        return type(self)(*chosen, self.digests)

    def to(self, device: torch.device) -> Self:
        """The same with its tensors on that device."""
        tokens, image, part = (sent(each, device) for each in (self.tokens, self.image, self.part))
        return type(self)(tokens, image, part, self.digests)


class ImagePlaces:
    """Which image and which part of it each of `T` tokens is, while a row is laid out."""

    def __init__(self, tokens: int) -> None:
        self.image = np.full(tokens, -1, np.int64)
        self.part = np.zeros(tokens, np.int64)
        self.digests: dict[str, int] = {}

    def add(self, path: Counts, images: Iterable[ImageSpan], shared: int) -> None:
        """Notes the images of a sequence behind its first `shared` tokens, which are already there.
        `path`: index in `[T]` of each of its tokens."""
        for span in images:
            if span.offset >= shared:
                at = path[span.offset : span.offset + span.tokens]
                self.image[at] = self.digests.setdefault(span.digest, len(self.digests))
                self.part[at] = np.arange(span.tokens)

    def row(self, ids: Counts, tokens: Counts | slice = slice(None)) -> RowImages | None:
        """The image tokens among these tokens, which have the given `ids`.

        Raises TrainingError: some are of no image, or an image is where text is.
        """
        wrong = int(((ids < 0) != (self.image[tokens] >= 0)).sum())
        if wrong:
            raise TrainingError(
                f"{wrong} tokens of a micro-batch are tokens of images, but not of those that the "
                "batch has, or the reverse"
            )
        return RowImages.of(self.image[tokens], self.part[tokens], tuple(self.digests))
