"""Attention over packed and prefix-shared sequences on CUDA, by FlexAttention.

Uncompiled, FlexAttention holds the scores of all `T²` pairs in memory. Invariants: it is compiled
without a graph break (`fullgraph`), and a model compiles one graph per window and shape of heads,
whatever the lengths of its rows: no length is so small that it is compiled as a constant.

Shapes: `T` tokens of a micro-batch, `H` query heads, `D` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from trainer.policy.compiled_layers import for_all_passes
from trainer.policy.mask import BLOCK, AttentionMask, block_mask
from trainer.rows.kept import Segment, one_row, with_past
from trainer.rows.packing import Layout

SHORTEST = 2 * BLOCK
"""Tokens of the shortest row that is compiled. The mask of a shorter one can have a single block, a
size that torch compiles as a constant; it is filled up instead."""
MAX_GRAPHS = 64
"""Number of graphs in a process: 2 for each shape of heads of the policy, a critic and teachers.
After torch's own 8, further shapes would run uncompiled."""


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    past: Sequence[Segment] = (),
) -> Tensor:
    """`[1, H, T, D]`. On CPU, FlexAttention runs uncompiled, for tests of its forward pass.

    A sink `s` takes the share `e^s / (e^s + e^lse)` of the probabilities, so that the output
    without it is multiplied by `σ(lse − s)`.
    """

    key, value = with_past(key, value, past)
    tokens = query.shape[2]
    if tokens < SHORTEST:
        query, key, value = (_filled_up(each, SHORTEST - tokens) for each in (query, key, value))
        mask = AttentionMask(_filled(mask.layout), mask.window)

    def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    kernel: Any = compiled() if query.is_cuda else flex_attention
    out, aux = kernel(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(mask.layout, mask.window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    result: Tensor = out[:, :, :tokens]
    if sinks is not None:
        share = torch.sigmoid(aux.lse[:, :, :tokens] - sinks.float().view(1, -1, 1))
        result = result * share[..., None].to(result.dtype)
    return result


def _filled_up(heads: Tensor, count: int) -> Tensor:
    more = heads.new_zeros(*heads.shape[:2], count, heads.shape[-1])
    return one_row((heads, more), heads)


@functools.lru_cache(maxsize=2)  # the layout of the micro-batch at hand, for all of its layers
def _filled(layout: Layout) -> Layout:
    """The layout with a path of further tokens at its end."""
    ends = layout.ends
    count = SHORTEST - layout.tokens
    more = torch.full((count,), len(ends) + count, dtype=ends.dtype, device=ends.device)
    images = layout.images
    if images is not None:
        images = torch.cat([images, torch.full_like(more, -1)])
    return Layout(torch.cat([ends, more]), layout.longest, layout.segments, images=images)


@functools.cache
def compiled(backend: Any = "inductor") -> Callable[..., Any]:
    """FlexAttention, compiled by one of torch's backends."""
    kernel: Any = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    # A soft cap is a float, which would otherwise break the graph; and two sizes that are equal in
    # the first row, such as numbers of heads and of blocks, are not equal in the next.
    dynamo = torch._dynamo.config.patch(specialize_float=True, recompile_limit=MAX_GRAPHS)
    config: Any = torch.fx.experimental._config
    sizes = config.patch(use_duck_shape=False)
    patched: Callable[..., Any] = for_all_passes(dynamo(sizes(kernel)))
    return patched
