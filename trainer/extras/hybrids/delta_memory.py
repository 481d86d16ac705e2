"""What fla's kernel of the gated delta rule needs, by shapes alone.

`KernelShapes` takes the kernel's place in a forward pass on tensors without memory. It keeps for
the backward pass what `chunk_gated_delta_rule` of flash-linear-attention 0.6.0 keeps
(`fla/ops/gated_delta_rule/chunk.py`), and counts what that kernel's backward pass allocates.

Shapes: `T` tokens, `H` heads, `K` and `V` head sizes of keys and values, `R` runs of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 64


class KernelShapes:
    """A rule of many runs (`delta_rule.Rule`), whose outputs have shapes only."""

    def __init__(self) -> None:
        self.extra = 0
        """Bytes that a backward pass allocates, beyond those that the kernel kept; of the largest
        call."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        bounds: Sequence[int],
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        kept = _kept(query, key, value, g, beta)
        size = sum(tensor.nbytes for tensor in kept)
        self.extra = max(self.extra, _backward_bytes(key, value, bounds) - size)
        runs = len(bounds) - 1
        given = (query, key, value, g, beta, initial_state, runs)
        out, final_R = _Kernel.apply(*given)  # type: ignore[no-untyped-call]
        return out, final_R


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        runs: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*_kept(query, key, value, g, beta), initial_state)
        heads, keys, values = *key.shape[2:], value.shape[-1]
        final_R = key.new_empty(runs, heads, keys, values, dtype=torch.float32)
        return torch.empty_like(value), final_R


def _kept(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
    """Normalised queries and keys with their norms, values, summed decays, betas, and the inverse
    of each chunk's matrix `[1, T, H, 64]`."""
    norms = [torch.empty_like(each[..., 0], dtype=torch.float32) for each in (query, key)]
    sums = torch.empty_like(g, dtype=torch.float32)
    inverse = key.new_empty(*key.shape[:3], CHUNK_TOKENS)
    return [torch.empty_like(query), torch.empty_like(key), *norms, value, sums, beta, inverse]


def _backward_bytes(key: Tensor, value: Tensor, bounds: Sequence[int]) -> int:
    """Five tensors like the keys, four like the values, and the states at the start of each chunk
    with their gradients."""
    _, tokens, heads, keys = key.shape
    values = value.shape[-1]
    chunks = sum(-(-(end - start) // CHUNK_TOKENS) for start, end in pairwise(bounds))
    elements = tokens * (5 * keys + 4 * values) + 2 * chunks * keys * values
    return heads * elements * key.element_size()
