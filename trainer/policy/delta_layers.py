"""Which layers of a model are Gated DeltaNet, whose packed rows the extra `hybrids` computes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from torch import nn

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Functions of transformers' modules that a Gated DeltaNet layer calls."""


def has_delta_layers(model: nn.Module) -> bool:
    """Whether some layers of the model are Gated DeltaNet."""
    return next(delta_layers(model), None) is not None


def delta_layers(model: nn.Module) -> Iterator[Any]:
    """The modules of the Gated DeltaNet layers."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and {CONVOLUTION, RULE} <= set(code.co_names):
            yield module


def has_fla() -> bool:
    """Whether fla, whose kernels run on CUDA, is installed."""
    return find_spec("fla") is not None
