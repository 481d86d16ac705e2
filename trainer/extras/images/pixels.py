"""The pixels of an image, as the model's own processor makes them of the bytes that an agent sent.

The engine turns an image upright and lays it on white before its processor gets it, and leaves
scaling and normalisation of Qwen's images to the tower (vLLM 0.32, measured in
docs/notes/images.md). Invariant:
`Pixels.digest` is that of the engine's item exactly if both have the same pixels, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoImageProcessor

from proxy.engines.images import GRID, PROBE, digest_of
from trainer.errors import ConfigError, TrainingError

PIXELS = "pixel_values"
PATCHES = "num_patches"
"""Of Gemma 3, into how many pictures the engine's processor has cut an image."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """Example: Pixels(values=[24, 1536] float32, grid=[1, 4, 6], digest="4aeb5f…")"""

    values: Tensor
    """`[P, C]`, a row for each patch, as the tower gets them; `[1, C, H, W]` of Gemma 3."""
    grid: Tensor
    """`[3]` int64, patches in time, height and width; `[0]` of Gemma 3."""
    digest: str
    """sha256 of the engine's item, in hexadecimal."""


class Processor:
    """The image processor of a checkpoint. Example: Processor(path).pixels(data)"""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: torchvision or the checkpoint's processor is missing."""
        if find_spec("torchvision") is None:
            raise ConfigError(
                "model.vision: the processor of images needs torchvision, which is not installed; "
                "beside torch for CPUs: python -m benchmarks.install torchvision, and start with "
                "PYTHONPATH=.cache/torchvision"
            )
        try:
            self._make = AutoImageProcessor.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.vision: {path} has no processor of images (preprocessor_config.json): "
                f"{' '.join(str(error).split())[:200]}"
            ) from error

    def pixels(self, data: bytes) -> Pixels:
        """Raises TrainingError: the bytes are not an image, or the processor cuts it in parts."""
        try:
            image = upright_on_white(data)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise TrainingError(f"the bytes are not an image: {error}") from error
        made = self._made(image)
        if GRID not in made:
            return _whole(made[PIXELS])
        raw = self._made(image, do_rescale=False, do_normalize=False)
        item = {PIXELS: raw[PIXELS], GRID: raw[GRID][0]}
        return Pixels(made[PIXELS], raw[GRID][0], item_digest(item))

    def joined(self, images: Sequence[tuple[bytes, str]]) -> tuple[Tensor, Tensor]:
        """The pixels of several images, `[P, C]`, and their grids, `[I, 3]`, for other trainers.

        Args:
            images: the bytes of each image, and the digest of what the engine had of it.

        Raises:
            TrainingError: it makes other pixels of an image than the engine had.
        """
        first = self.pixels(PROBE)
        made = [replace(first, values=first.values[:0])]  # of this type and width, without images
        for data, digest in images:
            pixels = self.pixels(data)
            if pixels.digest != digest:
                raise TrainingError(
                    f"the engine had other pixels of an image (digest {digest[:12]}) than this "
                    f"processor makes (digest {pixels.digest[:12]}); both need the same "
                    "transformers, torchvision and preprocessor_config.json"
                )
            made.append(pixels)
        grids = torch.stack([each.grid for each in made])[1:]
        return torch.cat([each.values for each in made]), grids

    def _made(self, image: Image.Image, **changes: Any) -> Any:
        return self._make(images=[image], return_tensors="pt", **changes)


def _whole(values: Tensor) -> Pixels:
    """Of a model without a grid, which gets one picture of one size."""
    if len(values) != 1:
        raise TrainingError(
            f"the processor cuts it into {len(values)} pictures; set do_pan_and_scan to false in "
            "preprocessor_config.json"
        )
    item = {PIXELS: values, PATCHES: torch.tensor(1)}
    return Pixels(values, torch.zeros(0, dtype=torch.int64), item_digest(item))


def upright_on_white(data: bytes) -> Image.Image:
    """The first frame of an image in RGB, turned as its EXIF orientation says, without
    transparency."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def item_digest(tensors: Mapping[str, Tensor]) -> str:
    """`PreparedImage.digest` of what an engine would have made of these tensors."""
    return digest_of(
        {
            name: (
                str(each.dtype).removeprefix("torch."),
                tuple(each.shape),
                each.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for name, each in tensors.items()
        }
    )
