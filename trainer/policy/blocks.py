"""Attention in blocks of queries: for sliding windows and soft-capping on CPU.

Invariant: as in `attention.py`. Each run is cut into blocks of consecutive tokens of a path. A
block attends to the last tokens before it on its path, as far as its first token's window reaches,
and to itself. It cuts no image whose tokens see each other. With a window `W`, `T` tokens cost
`T · 2W` products and not `T²`.

Shapes: `T` tokens of a micro-batch, `P` tokens of earlier pieces in front, `H` query heads, `G`
heads of keys and values, `D` head size, `B` queries of a block, `K` keys that a block attends to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.policy.mask import AttentionMask
from trainer.rows.packing import Layout

SMALLEST_BLOCK = 128
"""Queries of a block where the window is shorter: smaller products would not fill a core."""
LARGEST_BLOCK = 512
"""Queries of a block where the window is longer: bounds the `H * B * K` scores in memory."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `[start, stop)` of a row's own tokens, the keys that they may see, and which each of
    them sees."""

    start: int
    stop: int
    keys: Tensor
    """`[K]` int64, indices in the row with what is in front; ascending on the path."""
    hidden: Tensor
    """`[B, K]` bool: pairs outside the mask."""


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[1, H, T, D]`: `softmax(cap · tanh(scale · q·k / cap))` over the keys that the mask shows,
    and over the sink, if there is one. Keys and values are those of all `P + T` tokens.

    The scores of a block are computed again in the backward pass.
    """
    parts = [
        checkpoint(
            _attend,
            query[0, :, block.start : block.stop],
            key[0, :, block.keys],
            value[0, :, block.keys],
            block.hidden,
            scale,
            softcap,
            sinks,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for block in blocks_of(mask.layout, mask.window)
    ]
    return torch.cat(parts, 1)[None]


def _attend(
    query_H_B_D: Tensor,
    key_G_K_D: Tensor,
    value_G_K_D: Tensor,
    hidden_B_K: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    heads, count, _ = query_H_B_D.shape
    groups = key_G_K_D.shape[0]
    query = query_H_B_D.reshape(groups, heads // groups * count, -1)
    scores = (query @ key_G_K_D.mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(heads, count, -1).masked_fill(hidden_B_K, float("-inf"))
    if sinks_H is None:
        probs = scores.softmax(-1)
    else:
        sink = sinks_H.float().view(-1, 1, 1).expand(-1, count, -1)
        probs = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    probs = probs.to(value_G_K_D.dtype).reshape(groups, heads // groups * count, -1)
    return (probs @ value_G_K_D).view(heads, count, -1)


@functools.lru_cache(maxsize=4)  # one per window, for all layers of the micro-batch at hand
def blocks_of(layout: Layout, window: int | None) -> tuple[Block, ...]:
    """The blocks of the row, in order."""
    return tuple(_blocks(layout, window))


def _blocks(layout: Layout, window: int | None) -> Iterator[Block]:
    size = LARGEST_BLOCK if window is None else min(max(window, SMALLEST_BLOCK), LARGEST_BLOCK)
    depths, past = layout.depths, layout.past
    for number, (first, end, _) in enumerate(layout.runs):
        if end <= past:
            continue
        before = layout.path(number)
        start = first
        while start < end:
            stop = _without_cut(layout.images, min(start + size, end))
            keys = torch.cat([before, torch.arange(first, stop, device=before.device)])
            if window is not None:
                keys = keys[-(stop - start + window - 1) :]
            distance = depths[start:stop, None] - depths[None, keys]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            if layout.images is not None:
                own = layout.images[start:stop, None]
                hidden &= (own < 0) | (own != layout.images[None, keys])
            yield Block(start - past, stop - past, keys, hidden)
            start = stop


def _without_cut(images: Tensor | None, stop: int) -> int:
    """The end of the image in which a block would end, or `stop`."""
    if images is None or stop == len(images) or images[stop] < 0:
        return stop
    while stop < len(images) and images[stop] == images[stop - 1]:
        stop += 1
    return stop
