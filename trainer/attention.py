"""Attention over packed and prefix-shared sequences.

Invariant: a token sees exactly the tokens before it on its own path. A `Layout` says which those
are, as spans of tokens that each continue a path of earlier spans; a plain packed sequence is a
span that continues nothing. On CPU each span is one call of SDPA over its path's keys and values;
on CUDA the same layout is a FlexAttention block mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "packed_paths"
"""The name under which transformers' models find this attention."""

Piece = tuple[int, int]
"""The first so many tokens of a span: (index of the span, tokens)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of a micro-batch, which continue the path `prefix`."""

    start: int
    stop: int
    prefix: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Who sees whom among the `T` tokens of a micro-batch.

    Example: [5 6 7] and [5 6 8 9] with their prefix shared, laid out as 5 6 7 8 9:
        Layout((Span(0, 3), Span(3, 5, prefix=((0, 2),))))
        ends = [5 5 3 5 5]     # token i sees token j if j <= i < ends[j]
    """

    spans: tuple[Span, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> Layout:
        return Layout(self.spans, device)

    @functools.cached_property
    def tokens(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max((s.stop - s.start + _tokens(s.prefix) for s in self.spans), default=0)

    @functools.cached_property
    def ends(self) -> Tensor:
        """`[T]` int64: token `i` sees token `j` exactly if `j <= i < ends[j]`."""
        ends = torch.empty(self.tokens, dtype=torch.int64)
        open_: list[tuple[int, int]] = []  # [start, stop) of the path's pieces, in order
        for span in (*self.spans, Span(self.tokens, self.tokens)):
            kept = [(self.spans[i].start, self.spans[i].start + n) for i, n in span.prefix]
            for depth, (start, stop) in enumerate(open_):
                ends[(kept[depth][1] if depth < len(kept) else start) : stop] = span.start
            open_ = [*kept, (span.start, span.stop)]
        return ends.to(self.device)

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """The layout for FlexAttention."""
        ends = self.ends

        def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends[k])

        return create_block_mask(sees, None, None, self.tokens, self.tokens, self.device.type)

    @functools.cached_property
    def masks(self) -> tuple[Tensor | None, ...]:
        """Per span, `[L, P + L]` bool of what its tokens see; None where that is just causal."""
        return tuple(_lower_right(span) if span.prefix else None for span in self.spans)


def _tokens(path: tuple[Piece, ...]) -> int:
    return sum(length for _, length in path)


def _lower_right(span: Span) -> Tensor:
    length, prefix = span.stop - span.start, _tokens(span.prefix)
    return torch.ones(length, prefix + length, dtype=torch.bool).tril(prefix)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: `[1, H, T, D]` → `[1, T, H, D]`.

    Raises ValueError for what the model asks of attention beyond that.
    """
    if sliding_window is not None and sliding_window < layout.longest:
        raise ValueError(
            f"{type(module).__name__}: a sliding window of {sliding_window} tokens is shorter than"
            f" a sequence of {layout.longest}; packed attention covers full attention only"
        )
    attend = _flex if query.is_cuda else attend_by_span
    return attend(query, key, value, layout, scaling).transpose(1, 2), None


def attend_by_span(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None
) -> Tensor:
    """`[1, H, T, D]`; `split` rather than slices, whose backward would fill `[T]` per span."""
    lengths = [span.stop - span.start for span in layout.spans]
    queries, keys, values = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    outputs = []
    for i, (span, mask) in enumerate(zip(layout.spans, layout.masks, strict=True)):
        k, v = (
            torch.cat([*(x[j][:, :, :n] for j, n in span.prefix), x[i]], dim=2)
            if span.prefix
            else x[i]
            for x in (keys, values)
        )
        outputs.append(
            scaled_dot_product_attention(
                queries[i],
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)


def _flex(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    out: Tensor = _compiled_flex()(
        query, key, value, block_mask=layout.block_mask, scale=scale, enable_gqa=gqa
    )
    return out


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
