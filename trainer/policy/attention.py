"""Attention over packed and prefix-shared sequences, on CPU.

Invariant: a token attends to itself and to the tokens before it on its own path (within the sliding
window, if the layer has one), to the rest of an image whose tokens see each other, and to no
others. A `Layout` holds the end of each token's path. The
layout is cut into runs of tokens that are followed by the same tokens. SDPA's flash kernel is
called for each block of a run, with a causal mask; for each block and what of the run comes before
it; and for the run and all tokens that follow it. The results are merged by their log-sum-exps.
Layers with a sliding window or with soft-capping, and rows with such images, are computed in blocks
of queries instead. On CUDA
the same layout becomes a block mask of FlexAttention (`flex.py`).

The row of a piece of a tree has the keys and values of earlier pieces in front
(`trainer.rows.kept`).

Shapes: `T` tokens of a micro-batch, `P` tokens of earlier pieces in front, `H` query heads, `D`
head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainer.policy.blocks import attend_by_blocks
from trainer.policy.context_parallel import copied_heads, join_heads, own_heads, split_heads
from trainer.policy.flex import flex_attend
from trainer.policy.mask import AttentionMask
from trainer.rows.kept import Segment, with_past
from trainer.rows.packing import Layout, Run

_WITHOUT_EFFECT = frozenset(("position_ids", "use_cache", "cache_position", "output_attentions"))
"""Arguments that models pass to every attention and that are ignored here, because the layout is
causal and has no cache."""

CAUSAL_TOKENS = 128
"""Tokens of a causal call of the flash kernel, which also computes the half that it then masks."""

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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: `[1, H, T, D]` → `[1, T, H, D]`.

    `s_aux` `[H]` are attention sinks: a logit per head that takes a share of the probabilities and
    adds nothing to the output (gpt-oss). Raises ValueError for an argument that changes the result
    and is not supported here (dropout, a bias of positions, …), and if the model does not pass on
    `layout`.
    """
    kind = type(module).__name__
    for name, given in others.items():
        absent = given is None or (isinstance(given, int | float) and given == 0)
        if name not in _WITHOUT_EFFECT and not absent:
            raise ValueError(f"{kind}: packed attention does not compute the argument {name}")
    if is_causal is False:
        raise ValueError(f"{kind}: packed attention is causal, but the layer is not")
    if layout is None:
        raise ValueError(f"{kind} does not pass the layout of the packed row to attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = AttentionMask(layout, sliding_window)
    on_device = flex_attend if query.is_cuda else attend
    key, value = (copied_heads(each, layout, heads=1) for each in (key, value))
    query, key, value = (
        split_heads(each, layout, tokens=2, heads=1) for each in (query, key, value)
    )
    sinks = None if s_aux is None else own_heads(s_aux, layout)
    past: tuple[Segment, ...] = ()
    if layout.piece is not None:
        key, value = layout.piece.entered(module, key, value, dim=2)
        past = layout.piece.segments(module, key.device)
    out = on_device(query, key, value, mask, scale, softcap=softcap, sinks=sinks, past=past)
    # As transformers' own attention gives it: models may use `view`.
    return join_heads(out, layout, tokens=2, heads=1).transpose(1, 2).contiguous(), None


def attend(
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
    """`[1, H, T, D]`, in the type of autocast if that is on; values may have another head size."""
    mask = AttentionMask(mask.layout, mask.layout.windowed(mask.window))
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    if mask.window is not None or softcap is not None or mask.layout.images is not None:
        both = with_past(key, value, past)
        return attend_by_blocks(query, *both, mask, scale, softcap=softcap, sinks=sinks)
    past = [each.to(key.dtype) for each in past]
    if sinks is not None:
        column = (sinks / scale).to(query.dtype).view(1, -1, 1, 1)
        query = torch.cat([query, column.expand(-1, -1, query.shape[2], -1)], -1)
        past = [_sink(key, value), *(each.padded(key.shape[-1] + 1) for each in past)]
        out = attend_by_runs(query, pad(key, (0, 1)), value, after_sink(mask.layout), scale, past)
        return out[..., : value.shape[-1]]
    return attend_by_runs(query, key, value, mask.layout, scale, past)


def _sink(key: Tensor, value: Tensor) -> Segment:
    """The sinks as a token in front with the value 0, whose product with each query is the sink:
    one more element of the head is the sink in queries, and 1 in the key of this token."""
    one = key.new_zeros(1, key.shape[1], 1, key.shape[-1] + 1)
    one[..., -1] = 1
    return Segment(one, value.new_zeros(1, value.shape[1], 1, value.shape[-1]))


@functools.lru_cache(maxsize=2)  # the layout of the micro-batch at hand, for all of its layers
def after_sink(layout: Layout) -> Layout:
    """The layout with one token in front that all others attend to."""
    ends = pad(layout.ends + 1, (1, 0), value=len(layout.ends) + 1)
    return Layout(ends, layout.longest + 1, (1, *layout.segments))


def attend_by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    past: Sequence[Segment] = (),
) -> Tensor:
    """Attention to whole paths."""
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size:  # the kernel needs equal sizes; zeros do not change a product
        wide = max(size, value_size)
        query, key, value = (pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
        past = [each.padded(wide) for each in past]
    out: Tensor = _AttendByRuns.apply(  # type: ignore[no-untyped-call]
        query, key, value, layout.runs, scale, tuple(past)
    )
    return out[..., :value_size]


class _AttendByRuns(Function):
    """Attention by runs, with its gradient. FlashAttention's backward pass recomputes the
    probabilities of a part from the output and the log-sum-exp of the whole (Dao et al., arXiv
    2205.14135), so that the gradient is the sum of the gradients of the parts. Those of the past
    are added to its buffers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        runs: tuple[Run, ...],
        scale: float,
        past: tuple[Segment, ...],
    ) -> Tensor:
        _, heads, tokens, size = query.shape
        out = query.new_empty(1, tokens, heads, size, dtype=torch.float32).transpose(1, 2)
        logsumexp = query.new_empty(1, heads, tokens, dtype=torch.float32)
        done = 0  # the tokens before it have a result, with which the next one is merged
        for (keys, values), queries, causal, _ in _calls(key, value, runs, past):
            part, part_lse = _flash(
                query[:, :, queries], keys, values, is_causal=causal, scale=scale
            )
            into, into_lse = out[:, :, queries], logsumexp[:, :, queries]
            if queries.start < done:
                _merge(into, into_lse, part, part_lse)
            else:
                into.copy_(part)
                into_lse.copy_(part_lse)
                done = queries.stop
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.runs, ctx.scale, ctx.past = runs, scale, past
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
        for (keys, values), queries, causal, into in _calls(key, value, ctx.runs, ctx.past):
            of_query, of_key, of_value = _flash_backward(
                grad_out[:, :, queries],
                query[:, :, queries],
                keys,
                values,
                out[:, :, queries],
                logsumexp[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            grads[0][:, :, queries] += of_query
            if isinstance(into, Segment):
                into.add(of_key, of_value)
            else:
                grads[1][:, :, into] += of_key
                grads[2][:, :, into] += of_value
        grad_query, grad_key, grad_value = (grad.to(query.dtype) for grad in grads)
        return grad_query, grad_key, grad_value, None, None, None


def _calls(
    key: Tensor, value: Tensor, runs: Sequence[Run], past: Sequence[Segment]
) -> Iterator[tuple[tuple[Tensor, Tensor], slice, bool, Segment | slice]]:
    """`((keys, values), queries, causal, gradients)` of each flash call: the gradients of its keys
    and values belong to these own tokens, or to those of a segment."""
    before = sum(each.key.shape[2] for each in past)
    first = 0
    segments = iter(past)
    segment, border = None, 0
    for start, stop, end in runs:
        if stop <= before:
            if start >= border:
                segment = next(segments)
                first, border = border, border + segment.key.shape[2]
            assert segment is not None
            rows = segment.rows(start - first, stop - first)
            yield (rows.key, rows.value), slice(0, end - before), False, rows
            continue
        for keys, queries, causal in _parts((start - before, stop - before, end - before)):
            yield (key[:, :, keys], value[:, :, keys]), queries, causal, keys


def _parts(run: Run) -> Iterator[tuple[slice, slice, bool]]:
    """`(keys, queries, causal)` of each flash call on the keys and values of a run."""
    start, stop, end = run
    for first in range(start, stop, CAUSAL_TOKENS):
        block = slice(first, min(first + CAUSAL_TOKENS, stop))
        yield block, block, True
        if start < first:
            yield slice(start, first), block, False
    if stop < end:
        yield slice(start, stop), slice(stop, end), False


def _merge(out: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the attention over two sets of keys, in place, into the first result."""
    both = torch.logaddexp(logsumexp, part_lse)
    out.mul_((logsumexp - both).exp_()[..., None])
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp_()[..., None])
    logsumexp.copy_(both)
