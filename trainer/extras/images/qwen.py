"""Images of Qwen3-VL and Qwen3.5, dense and with experts: their tower, M-RoPE, deep-stack features.

The features of an image are computed once for each batch, alone, so that they do not depend on what
stands beside it. Rows of a trained tower get them as leaves; their gradients are summed over all
rows of a step, and `backward` computes each image again and continues into the tower.

Shapes: `T` tokens of a row, `I` of them tokens of images, `N` tokens of an image, `D` hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxy.records import ImageSpan
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.extras.images.pixels import Pixels, Processor
from trainer.rows.images import Counts, RowImages
from trainer.rows.packing import MicroBatch
from trainer.transfers import sent

Features = tuple[Tensor, ...]
"""`[N, D]` for the embeddings, and for each deep-stack layer."""


class QwenReader:
    """An `ImageReader`."""

    whole_images = False

    def __init__(self, model: Any, path: Path, dtype: torch.dtype, *, trained: bool) -> None:
        self._inner = model.model
        self._path = path
        self._dtype = dtype
        self._processor = Processor(path)
        self._pixels: dict[str, Pixels] = {}
        """By sha256 of the image's bytes."""
        self._features: dict[str, Features] = {}
        """By digest, in the machine's memory."""
        self._gradients: dict[str, tuple[Tensor, ...]] = {}
        self.trained = trained

    @property
    def tower(self) -> nn.Module:
        tower: nn.Module = self._inner.visual
        return tower

    def positions(self, tokens: int, images: Sequence[ImageSpan]) -> Counts:
        if not images:
            return np.broadcast_to(np.arange(tokens), (3, tokens))
        kinds = torch.zeros(1, tokens, dtype=torch.int32)
        for image in images:
            kinds[0, image.offset : image.offset + image.tokens] = 1
        grids = torch.tensor([image.grid for image in images])
        places, _ = self._inner.get_rope_index(kinds.long(), kinds, image_grid_thw=grids)
        return np.asarray(places[:, 0])

    def read(self, batch: Batch) -> None:
        spans = {(span.sha256, span.digest): span for own in batch.images for span in own}
        new = [span for span in spans.values() if span.digest not in self._features]
        if new:  # of another batch, then
            for known, kept in ((self._features, 1), (self._pixels, 0)):
                for name in known.keys() - {pair[kept] for pair in spans}:
                    del known[name]
        for index, own in enumerate(batch.images):
            for span in own:
                try:
                    self._check(span, own, batch)
                except TrainingError as error:
                    trial = batch.trial_ids[int(batch.sequence_rollout[index])]
                    raise TrainingError(f"rollout {trial}: {error}") from error
        for span in new:
            pixels = self._pixels[span.sha256]
            if span.digest not in self._features:
                with torch.no_grad():
                    made = self._computed(pixels)
                self._features[span.digest] = tuple(each.cpu() for each in made)
            if not self.trained:
                self._pixels[span.sha256] = replace(pixels, values=pixels.values[:0])

    def inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """Embeddings in which the features of the row's images stand, and what deep-stack layers
        add."""
        images = micro.images
        assert images is not None
        embedded = self._inner.get_input_embeddings()(micro.ids.clamp(min=0))
        levels = self._rows(images, embedded)
        first, *deep = levels
        mask = torch.zeros_like(micro.ids, dtype=torch.bool).index_fill(0, images.tokens, True)
        given = {"inputs_embeds": embedded.index_copy(0, images.tokens, first)[None]}
        if deep:
            given |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deep}
        return given

    def backward(self) -> None:
        by_digest = {pixels.digest: pixels for pixels in self._pixels.values()}
        for digest in sorted(self._gradients):
            with torch.enable_grad():
                made = self._computed(by_digest[digest])
            gradients = [sent(each, made[0].device) for each in self._gradients[digest]]
            torch.autograd.backward(
                made, [each.to(m.dtype) for each, m in zip(gradients, made, strict=True)]
            )
        self._gradients.clear()

    def forget(self) -> None:
        self._features.clear()
        self._gradients.clear()
        if not self.trained:
            self._pixels.clear()  # they were emptied when the features were computed

    def _check(self, span: ImageSpan, own: Sequence[ImageSpan], batch: Batch) -> None:
        """Raises TrainingError: the span is not what the model makes of the image's bytes."""
        name = f"image {span.sha256[:12]}"
        if span.sha256 not in self._pixels:
            data = batch.pictures.get(span.sha256)
            if data is None:
                raise TrainingError(f"{name}: its bytes are missing")
            if (found := hashlib.sha256(data).hexdigest()) != span.sha256:
                raise TrainingError(f"{name}: its bytes are those of another image, {found[:12]}")
            try:
                self._pixels[span.sha256] = self._processor.pixels(data)
            except TrainingError as error:
                raise TrainingError(f"{name}: {error}") from error
        pixels = self._pixels[span.sha256]
        if pixels.digest != span.digest:
            raise TrainingError(
                f"{name}: the engine had other pixels of it (digest {span.digest[:12]}) than the "
                f"processor of {self._path} makes (digest {pixels.digest[:12]}); trainer and "
                "engines need the same transformers, torchvision and preprocessor_config.json"
            )
        grid, tokens = tuple(pixels.grid.tolist()), self._tokens(pixels)
        if span.grid != grid or span.tokens != tokens:
            raise TrainingError(
                f"{name}: it was recorded with {span.tokens} tokens for patches {span.grid}, but "
                f"has {tokens} for {grid}"
            )
        if any(each.offset + each.tokens == span.offset for each in own):
            raise TrainingError(
                f"{name}: it follows another image without a token between them, which "
                f"{type(self._inner).__name__} cannot place"
            )

    def _computed(self, pixels: Pixels) -> Features:
        device, low = next(self.tower.parameters()).device, self._dtype != torch.float32
        with torch.autocast(device.type, self._dtype, enabled=low):
            return self._made(pixels)

    def _tokens(self, pixels: Pixels) -> int:
        """Number of tokens of an image."""
        merge: int = self._inner.config.vision_config.spatial_merge_size
        return int(pixels.grid.prod()) // merge**2

    def _made(self, pixels: Pixels) -> Features:
        """The features of an image."""
        device = next(self.tower.parameters()).device
        made = self._inner.get_image_features(
            sent(pixels.values, device), sent(pixels.grid[None], device)
        )
        deep = getattr(made, "deepstack_features", None) or ()
        return tuple(level[0] for level in (made.pooler_output, *deep))

    def _rows(self, images: RowImages, embedded: Tensor) -> list[Tensor]:
        """What each image token has of its image, `[I, D]`, for each level."""
        found = [self._features[digest] for digest in images.digests]
        starts = np.cumsum([0, *(len(each[0]) for each in found)])
        at = sent(torch.as_tensor(starts), images.image.device)[images.image] + images.part
        levels = []
        for level in range(len(found[0])):
            whole = torch.cat([sent(each[level], embedded.device) for each in found])
            rows = whole[at].to(embedded.dtype)
            if self.trained and torch.is_grad_enabled():
                rows.requires_grad_()
                add = partial(self._add, images, level)
                rows.register_hook(add)  # type: ignore[no-untyped-call]
            levels.append(rows)
        return levels

    def _add(self, images: RowImages, level: int, gradient: Tensor) -> None:
        """Adds the gradient of a row's image tokens, `[I, D]`, to that of their images."""
        image, part = images.image.cpu(), images.part.cpu()
        for number, digest in enumerate(images.digests):
            if digest not in self._gradients:
                self._gradients[digest] = tuple(
                    torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
                    for each in self._features[digest]
                )
            own = image == number
            into = self._gradients[digest][level]
            into.index_add_(0, part[own], gradient.cpu()[own].to(into.dtype))
