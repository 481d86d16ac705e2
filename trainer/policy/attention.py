"""Attention over packed and prefix-shared sequences.

Invariant: a token sees exactly the tokens before it on its own path. A `Layout` says which those
are by where each token's path ends. On CPU it is cut into runs of tokens that the same tokens
follow: each run is one causal call of SDPA's flash kernel for itself and one unmasked call for all
that follow it, and the parts are merged by their log-sum-exps. On CUDA the same layout is a
FlexAttention block mask.

Shapes: `T` tokens of a micro-batch, `H` query heads, `D` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad

ATTENTION = "packed_paths"
"""The name under which transformers' models find this attention."""

Run = tuple[int, int, int]
"""`(start, stop, end)`: the tokens `[start, stop)` are seen by those after them up to `end`."""

# What `scaled_dot_product_attention` runs on CPU. Called by name, as it also gives the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Layout:
    """Who sees whom among the `T` tokens of a micro-batch.

    Example: [5 6 7] and [5 6 8 9] with their prefix shared, laid out as 5 6 7 8 9:
        ends = [5 5 3 5 5]     longest = 4
        runs = ((0, 2, 5), (2, 3, 3), (3, 5, 5))
    """

    ends: Tensor
    """`[T]` int64: token `i` sees token `j` exactly if `j <= i < ends[j]`."""
    longest: int
    """Tokens of the longest path."""

    def to(self, device: torch.device) -> Layout:
        return Layout(self.ends.to(device), self.longest)

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        changes = (self.ends[1:] != self.ends[:-1]).nonzero()[:, 0] + 1
        starts = [0, *changes.tolist(), len(self.ends)]
        ends = self.ends[starts[:-1]].tolist()
        return tuple(zip(starts[:-1], starts[1:], ends, strict=True))

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """The layout for FlexAttention."""
        ends, tokens = self.ends, len(self.ends)

        def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends[k])

        return create_block_mask(sees, None, None, tokens, tokens, ends.device.type)


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
    attend = _flex if query.is_cuda else attend_by_runs
    return attend(query, key, value, layout, scaling).transpose(1, 2), None


def attend_by_runs(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None
) -> Tensor:
    """`[1, H, T, D]`, in autocast's type where that is on; values may have another head size."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    size, value_size = query.shape[-1], value.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if size != value_size:  # the kernel has one size: zeros add nothing to a product
        wide = max(size, value_size)
        query, key, value = (pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    out: Tensor = _AttendByRuns.apply(  # type: ignore[no-untyped-call]
        query, key, value, layout.runs, scale
    )
    return out[..., :value_size]


class _AttendByRuns(Function):
    """FlashAttention's backward pass recomputes a part's probabilities from the whole's output and
    log-sum-exp (Dao et al., arXiv 2205.14135), so the gradients of the parts add up exactly."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: tuple[Run, ...],
        scale: float,
    ) -> Tensor:
        _, heads, tokens, size = query.shape
        out = query.new_empty(1, tokens, heads, size, dtype=torch.float32).transpose(1, 2)
        logsumexp = query.new_empty(1, heads, tokens, dtype=torch.float32)
        seen = 0
        for run in runs:
            start, _, end = run
            for keys, queries, causal in _parts(run):
                part, part_lse = _flash(
                    query[:, :, queries],
                    key[:, :, keys],
                    value[:, :, keys],
                    is_causal=causal,
                    scale=scale,
                )
                into, into_lse = out[:, :, queries], logsumexp[:, :, queries]
                if start < seen:
                    _merge(into, into_lse, part, part_lse)
                else:  # a path begins here: its tokens have seen nothing yet
                    into.copy_(part)
                    into_lse.copy_(part_lse)
            seen = max(seen, end)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for run in ctx.runs:
            for keys, queries, causal in _parts(run):
                parts = _flash_backward(
                    grad_out[:, :, queries],
                    query[:, :, queries],
                    key[:, :, keys],
                    value[:, :, keys],
                    out[:, :, queries],
                    logsumexp[:, :, queries],
                    0.0,
                    causal,
                    scale=ctx.scale,
                )
                for grad, rows, part in zip(grads, (queries, keys, keys), parts, strict=True):
                    grad[:, :, rows] += part
        grad_query, grad_key, grad_value = (grad.to(query.dtype) for grad in grads)
        return grad_query, grad_key, grad_value, None, None


def _parts(run: Run) -> Iterator[tuple[slice, slice, bool]]:
    """`(keys, queries, causal)` of the flash calls that a run's keys and values take part in."""
    start, stop, end = run
    keys = slice(start, stop)
    yield keys, keys, True
    if stop < end:
        yield keys, slice(stop, end), False


def _merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Attention over two sets of keys, from that over each; in place, into the first."""
    both = torch.logaddexp(logsumexp, part_lse)
    out.mul_((logsumexp - both).exp_()[..., None])
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp_()[..., None])
    logsumexp.copy_(both)


def _flex(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    out: Tensor = _compiled_flex()(
        query, key, value, block_mask=layout.block_mask, scale=scale, enable_gqa=gqa
    )
    return out


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
