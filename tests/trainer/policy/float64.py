"""Computes everything in float64, to compare two orders of the same sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch._inductor.codegen.cpp  # its tables name torch.float32, and are not to be made inside

from trainer.policy.model_config import DTYPES


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, `torch.float32` is float64 for whoever asks for it: layers, losses, checkpoints.

    Small random models in float32 are 1e-5 from the truth (gradients of Qwen 3.5, relative to the
    largest element), so that two ways to compute one thing differ by as much, and by more on some
    processors. In float64 they differ by 1e-14, and a fault of either shows.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(torch, "float32", torch.float64),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
            patch.dict(DTYPES, float32=torch.float64),
            # PyTorch multiplies groups in float32 and less only.
            patch("transformers.integrations.moe._can_use_grouped_mm", return_value=False),
        ):
            yield
    finally:
        torch.set_default_dtype(usual)
