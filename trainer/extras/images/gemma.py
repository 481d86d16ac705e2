"""Images of Gemma 3: its SigLIP tower and projector, whose tokens see each other.

An image is resized to a square and has the same number of tokens whatever its size. Its tokens have
the positions of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from proxy.records import ImageSpan
from trainer.errors import ConfigError
from trainer.extras.images.pixels import Pixels
from trainer.extras.images.qwen import Features, QwenReader
from trainer.rows.images import Counts
from trainer.transfers import sent


class GemmaReader(QwenReader):
    """An `ImageReader`."""

    whole_images = True

    def __init__(self, model: Any, path: Path, dtype: torch.dtype, *, trained: bool) -> None:
        """Raises ConfigError: a sliding window is shorter than an image, whose mask engines then
        leave out."""
        super().__init__(model, path, dtype, trained=trained)
        config = model.config
        window = config.get_text_config().sliding_window
        if window is not None and window < config.mm_tokens_per_image:
            raise ConfigError(
                f"model.vision: {path}: sliding_window={window} is shorter than an image "
                f"(mm_tokens_per_image={config.mm_tokens_per_image}); set model.vision=text"
            )
        self._tower = nn.ModuleList([self._inner.vision_tower, self._inner.multi_modal_projector])

    @property
    def tower(self) -> nn.Module:
        return self._tower

    def positions(self, tokens: int, images: Sequence[ImageSpan]) -> Counts:
        return np.arange(tokens)

    def _tokens(self, pixels: Pixels) -> int:
        return int(self._inner.config.mm_tokens_per_image)

    def _made(self, pixels: Pixels) -> Features:
        device = next(self.tower.parameters()).device
        made = self._inner.get_image_features(sent(pixels.values, device))
        return (made.pooler_output[0],)
