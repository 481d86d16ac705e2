"""Several ranks compute one micro-batch together, each a part of its tokens.

Invariant: a group of `C` ranks computes the same scores and gradients as one rank, up to rounding.
Everything that is computed for each token alone (embeddings, norms, MLPs, experts, output layer) is
computed by the rank that holds the token. Tokens meet only in attention, in the convolution, and in
the delta rule (`proof.py` would find anything else). There, each rank exchanges its tokens of all
heads for all tokens of its own heads, so that masks and layouts are those of the whole row
(DeepSpeed-Ulysses, arXiv 2309.14509). Every rank has the scores of all tokens and computes the
whole loss of the micro-batch; the gradient flows back only through its own tokens.

Shapes: `T` tokens of a micro-batch, `C` ranks, `S = ⌈T / C⌉` tokens of a rank, `H` heads, `M`
trained tokens of the micro-batch, `m` of them predicted by tokens of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainer.rows.packing import Layout, MicroBatch
from trainer.transfers import sent


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that compute each micro-batch together; `ContextRanks()` is a single rank.

    Without a `group`, nothing is exchanged, but all shapes are those of a rank of the group.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def part(self, micro: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch; the micro-batch itself for a single rank."""
        if self.size == 1:
            return micro
        tokens = len(micro.ids)
        count = -(-tokens // self.size)
        start = self.rank * count

        def held(row: Tensor, fill: int = 0) -> Tensor:
            own = row[start : start + count]
            return pad(own, (*[0, 0] * (own.dim() - 1), 0, count - len(own)), value=fill)

        own = (micro.predictors // count == self.rank).nonzero()[:, 0]
        return MicroBatchPart(
            ids=held(micro.ids),
            positions=held(micro.positions.movedim(-1, 0)).movedim(0, -1),
            layout=SharedLayout(
                micro.layout.last_ends,
                micro.layout.longest,
                micro.layout.segments,
                micro.layout.piece,
                images=micro.layout.images,
                front=micro.layout.front,
                ranks=self,
            ),
            targets=micro.targets,
            predictors=micro.predictors[own] - start,
            experts=None if micro.experts is None else held(micro.experts, fill=-1),
            share=micro.share,
            reads_only=micro.reads_only,
            images=micro.images and micro.images.within(start, start + count),
            own=own,
        )

    def exchange(self, rows: Tensor) -> Tensor:
        """`[C, …]`: `rows[r]` goes to rank `r` of the group; `result[r]` came from it."""
        result: Tensor = _Exchange.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def joined(self, values: Tensor, at: Tensor, count: int) -> Tensor:
        """`[count, …]` on every rank, from the rows `at` of each. All ranks must compute the same
        from the result: the gradient of a row flows back to the rank that gave it, once."""
        rows = values.new_zeros(count, *values.shape[1:]).index_copy(0, at, values)
        result: Tensor = _Joined.apply(rows, self)  # type: ignore[no-untyped-call]
        return result


@dataclass(frozen=True, eq=False)
class SharedLayout(Layout):
    """The layout of a whole row, of which each of the `ranks` holds `S` consecutive tokens. The
    last rank's tokens after the end of the row attend to nothing, and nothing attends to them."""

    ranks: ContextRanks = ContextRanks()


@dataclass(frozen=True, slots=True)
class MicroBatchPart(MicroBatch):
    """One rank's part of a micro-batch. `ids`, `positions` and `experts` are those of its `S`
    tokens, the layout is that of the whole row, and `predictors` `[m]` are indices in `[S]`.

    Example: rank 1 of 2 of the micro-batch in `MicroBatch`:
        ids = [8 9 0]    positions = [2 3 0]    targets = [0 1 2]    predictors = [0]    own = [2]
    """

    own: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """`[m]` int64, index in `[M]` of each target that a token of this part predicts."""

    def to(self, device: torch.device) -> Self:
        return replace(MicroBatch.to(self, device), own=sent(self.own, device))


def of_part(micro: MicroBatch, values: Tensor) -> Tensor:
    """`[M, …]` → `[m, …]`: the values of the targets that this part predicts."""
    return values[micro.own] if isinstance(micro, MicroBatchPart) else values


def of_whole(micro: MicroBatch, values: Tensor) -> Tensor:
    """`[m]` → `[M]`: the values of all targets, from all ranks of the group."""
    if not isinstance(micro, MicroBatchPart):
        return values
    return _ranks(micro.layout).joined(values, micro.own, len(micro.targets))


def all_tokens(micro: MicroBatch, rows: Tensor) -> Tensor:
    """`[S, …]` → `[T, …]`: a row for each token, from all ranks of the group."""
    ranks, tokens, count = _ranks(micro.layout), micro.layout.tokens, len(rows)
    if ranks.size == 1:
        return rows
    start, stop = (min(each * count, tokens) for each in (ranks.rank, ranks.rank + 1))
    at = torch.arange(start, stop, device=rows.device)
    return ranks.joined(rows[: len(at)], at, tokens)


def split_heads(row: Tensor, layout: Layout, *, tokens: int, heads: int) -> Tensor:
    """`S` tokens of `H` heads → `T` tokens of this rank's `H / C` heads, in the given dimensions.

    Raises ValueError if the ranks cannot divide the heads.
    """
    ranks = _ranks(layout)
    if ranks.size == 1:
        return row
    first = row.movedim((tokens, heads), (0, 1))
    count, number, *rest = first.shape
    if number % ranks.size:
        raise ValueError(
            f"trainer.context_parallel={ranks.size}: a layer has {number} heads or channels, which "
            "this number of ranks cannot divide"
        )
    own = number // ranks.size
    by_rank = first.reshape(count, ranks.size, own, *rest).movedim(1, 0)
    whole = ranks.exchange(by_rank).flatten(0, 1)[: layout.tokens]
    return whole.movedim((0, 1), (tokens, heads))


def join_heads(row: Tensor, layout: Layout, *, tokens: int, heads: int) -> Tensor:
    """The inverse of `split_heads`; the tokens after the end of the row are 0."""
    ranks = _ranks(layout)
    if ranks.size == 1:
        return row
    first = row.movedim((tokens, heads), (0, 1))
    count, own, *rest = first.shape
    first = pad(first, (*[0, 0] * (first.dim() - 1), 0, -count % ranks.size))
    by_rank = first.reshape(ranks.size, -1, own, *rest)
    whole = ranks.exchange(by_rank).movedim(0, 1).flatten(1, 2)
    return whole.movedim((0, 1), (tokens, heads))


def copied_heads(row: Tensor, layout: Layout, *, heads: int) -> Tensor:
    """Copies heads of keys and values, which several heads of queries share, as often as is needed
    for the ranks to divide them."""
    ranks = _ranks(layout)
    copies = ranks.size // math.gcd(ranks.size, row.shape[heads])
    return row if copies == 1 else row.repeat_interleave(copies, dim=heads)


def own_heads(weight: Tensor, layout: Layout) -> Tensor:
    """`[H, …]` → `[H / C, …]`: the weights of this rank's heads or channels."""
    ranks = _ranks(layout)
    own = len(weight) // ranks.size
    return weight[ranks.rank * own : (ranks.rank + 1) * own]


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks = ranks
        return _exchanged(rows, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.ranks), None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ContextRanks) -> Tensor:
        if ranks.group is None:
            return rows.clone()
        ctx.mark_dirty(rows)
        dist.all_reduce(rows, group=ranks.group)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _exchanged(rows: Tensor, ranks: ContextRanks) -> Tensor:
    rows = rows.contiguous()
    if ranks.group is None:
        return rows.clone()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=ranks.group)
    return received


def _ranks(layout: Layout) -> ContextRanks:
    return layout.ranks if isinstance(layout, SharedLayout) else ContextRanks()
