"""Attention over packed and prefix-shared sequences on CUDA, by FlexAttention.

Shapes: `T` tokens of a micro-batch, `H` query heads, `D` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from trainer.policy.mask import AttentionMask, block_mask


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[1, H, T, D]`. On CPU, FlexAttention runs uncompiled, for tests of its forward pass.

    A sink `s` takes the share `e^s / (e^s + e^lse)` of the probabilities, so that the output
    without it is multiplied by `σ(lse − s)`.
    """

    def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    kernel: Any = _compiled() if query.is_cuda else flex_attention
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
    result: Tensor = out
    if sinks is not None:
        share = torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1))
        result = result * share[..., None].to(result.dtype)
    return result


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
