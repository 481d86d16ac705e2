"""Products of experts in the type of autocast, as those of linear layers.

transformers multiplies by experts in the type of their weights, because torch's grouped product is
not one that autocast knows. For weights in float32 this is not the type in which the engine
multiplies; and CUDA has a kernel for bfloat16 only, in place of which it copies the bounds of the
groups to the host, waits, and multiplies by one expert after the other.

Invariant: the experts of all layers are of one class, whose function torch compiles once. A
function of each module's own would be compiled for each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of several experts in one, of which a module has two."""
GROUPED = "grouped_mm"
"""transformers' name of grouped products."""


def multiply_in_autocast(model: nn.Module) -> None:
    """Of all experts that transformers multiplies by grouped products."""
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            own: Any = type(module)
            module.__class__ = _in_autocast(own)


@cache
def _in_autocast(own: Any) -> Any:
    """The class of experts with `own`'s weights, settings and name."""

    def forward(experts: Any, hidden: Tensor, *chosen: Tensor) -> Tensor:
        """`[T, D]`; `chosen`: the experts of each token and their weights, `[T, K]`."""
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind) and experts.config._experts_implementation == GROUPED:
            low = _InType(experts, torch.get_autocast_dtype(kind))
            multiplied: Tensor = grouped_mm_experts_forward(low, hidden, *chosen)
            return multiplied
        found: Tensor = own.forward(experts, hidden, *chosen)
        return found

    return type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})


class _InType:
    """Experts with their weights in another type. The cast has the gradient of the weights."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        for name in WEIGHTS:
            if hasattr(experts, name):
                setattr(self, name, getattr(experts, name).to(dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
