"""Attention over packed and prefix-shared sequences.

Invariant: a token attends to itself and to the tokens before it on its own path, and to no others.
A `Layout` holds the end of each token's path. On CPU the layout is cut into runs of tokens that are
followed by the same tokens. For each run, SDPA's flash kernel is called once with a causal mask for
the run itself, and once without a mask for all tokens that follow it. The results are merged by
their log-sum-exps. On CUDA the same layout becomes a block mask of FlexAttention.

Shapes: `T` tokens of a micro-batch, `H` query heads, `D` head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from trainer.packing import Layout, Run

_WITHOUT_EFFECT = frozenset(
    ("position_ids", "use_cache", "cache_position", "output_attentions", "is_causal")
)
"""Arguments that models pass to every attention and that are ignored here, because the layout is
causal and has no cache."""

# The kernels of `scaled_dot_product_attention` on CPU. They are called by name because these calls
# also return the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: `[1, H, T, D]` → `[1, T, H, D]`.

    Raises ValueError for an argument that changes the result and is not supported here (attention
    sinks, soft-capping, dropout, …), and if the model does not pass on `layout`.
    """
    kind = type(module).__name__
    for name, given in others.items():
        absent = given is None or (isinstance(given, int | float) and given == 0)
        if name not in _WITHOUT_EFFECT and not absent:
            raise ValueError(f"{kind}: packed attention does not compute the argument {name}")
    if layout is None:
        raise ValueError(f"{kind} does not pass the layout of the packed row to attention")
    if sliding_window is not None and sliding_window < layout.longest:
        raise ValueError(
            f"{kind}: a sliding window of {sliding_window} tokens is shorter than"
            f" a sequence of {layout.longest}; packed attention covers full attention only"
        )
    attend = _flex if query.is_cuda else attend_by_runs
    return attend(query, key, value, layout, scaling).transpose(1, 2), None


def attend_by_runs(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float | None
) -> Tensor:
    """`[1, H, T, D]`, in the type of autocast if that is on; values may have another head size."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    size, value_size = query.shape[-1], value.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if size != value_size:  # the kernel needs equal sizes; zeros do not change a product
        wide = max(size, value_size)
        query, key, value = (pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    out: Tensor = _AttendByRuns.apply(  # type: ignore[no-untyped-call]
        query, key, value, layout.runs, scale
    )
    return out[..., :value_size]


class _AttendByRuns(Function):
    """Attention by runs, with its gradient. FlashAttention's backward pass recomputes the
    probabilities of a part from the output and the log-sum-exp of the whole (Dao et al., arXiv
    2205.14135), so that the gradient is the sum of the gradients of the parts.
    """

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
                else:  # the start of a path, whose tokens have no earlier part to merge with
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
    """`(keys, queries, causal)` of each flash call on the keys and values of a run."""
    start, stop, end = run
    keys = slice(start, stop)
    yield keys, keys, True
    if stop < end:
        yield keys, slice(stop, end), False


def _merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the attention over two sets of keys, in place, into the first result."""
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
