"""The mask of an attention layer over a packed row.

Invariant: token `q` sees token `k` exactly if `k` is `q` or before it on its path, and fewer than
`window` tokens before it, or if both are of one image whose tokens see each other.

Shapes: `T` tokens of a micro-batch, `P` tokens of earlier pieces in front, `N` blocks of `BLOCK`
queries, `M` blocks of as many keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.rows.packing import Layout

BLOCK = 128
"""Tokens of a block of FlexAttention's mask, its default."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Example: AttentionMask(layout, window=512)"""

    layout: Layout
    window: int | None = None
    """Number of tokens that a token sees, itself included; None: its whole path."""


@functools.lru_cache(maxsize=4)  # one per window, for all layers of the micro-batch at hand
def block_mask(layout: Layout, window: int | None) -> BlockMask:
    """The mask for FlexAttention.

    Which blocks are empty, full or mixed follows from the smallest and largest `ends` and depths of
    each block: `N × M` numbers. `create_block_mask` would need 10.7 bytes for each pair of tokens
    (171 GiB for 131,072 tokens). An empty block that is treated as mixed is masked correctly and
    only costs time.
    """
    ends, depths, past = layout.ends, layout.depths, layout.past
    # a tensor, because a number would be compiled as a constant; filled there, so that no copy is
    # waited for
    front = torch.full((), past, device=ends.device)

    images = layout.images

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = q + front
        seen = (k <= at) & (at < ends[k])
        if window is not None:
            seen = seen & (depths[at] - depths[k] < window)
        if images is None:
            return seen
        return seen | ((images[at] >= 0) & (images[at] == images[k]))

    first_q, last_q = _bounds(layout.tokens, ends.device)
    first_k, last_k = _bounds(len(ends), ends.device)
    first_q, last_q = first_q + past, last_q + past
    earlier = last_k[None, :] <= first_q[:, None]
    near = ~earlier & (first_k[None, :] <= last_q[:, None])
    latest, soonest = _of_blocks(ends, "amax"), _of_blocks(ends, "amin")
    some = near | (earlier & (latest[None, :] > first_q[:, None]))
    full = earlier & (soonest[None, :] > last_q[:, None])
    if window is not None:
        own = depths[past:]
        low, high = _of_blocks(own, "amin"), _of_blocks(own, "amax")
        some &= near | (low[:, None] - _of_blocks(depths, "amax")[None, :] < window)
        full &= high[:, None] - _of_blocks(depths, "amin")[None, :] < window
    if images is not None:  # numbered in the order of the row, which is no piece of a tree
        last = _of_blocks(images, "amax")
        first = _of_blocks(torch.where(images < 0, len(images), images), "amin")
        some |= (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
    # The last block may hold fewer tokens; FlexAttention tests bounds only in mixed blocks.
    full[:, -1] = full[-1] = False
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(layout.tokens, len(ends)),
    )


def _bounds(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and the last token of each block."""
    first = torch.arange(-(-tokens // BLOCK), device=device) * BLOCK
    return first, (first + BLOCK - 1).clamp(max=tokens - 1)


def _of_blocks(values: Tensor, reduction: str) -> Tensor:
    """`[N]`: the smallest or largest value of each block; the last value fills the last block."""
    short = -len(values) % BLOCK
    filled = torch.cat([values, values[-1:].expand(short)]).view(-1, BLOCK)
    return filled.amin(1) if reduction == "amin" else filled.amax(1)


def _listed(blocks_N_N: Tensor) -> tuple[Tensor, Tensor]:
    """`(counts, indices)` of the chosen key blocks of each query block, as BlockMask wants them."""
    counts = blocks_N_N.sum(1, dtype=torch.int32)
    order = blocks_N_N.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return counts[None, None], order.to(torch.int32)[None, None].contiguous()
