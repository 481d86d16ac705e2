"""Packs sequences into micro-batches: each row holds several whole sequences, without padding.

Invariant: every trained token of the chosen sequences is a target of exactly one micro-batch, and
the token that predicts it attends to the earlier tokens of its own sequence only. With
`share_prefixes` the sequences of a group are laid out as a radix tree, in which each common prefix
occurs once. What a token attends to, its position and its targets stay the same, and therefore the
loss and the gradients do, too.

Shapes: `T` input tokens of a micro-batch, `M` of the batch's `N` trained tokens.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from proxy.records import Ids, ImageSpan
from proxy.records.images import uncut
from trainer.batch import Batch, RowPlan, Unit
from trainer.rows.images import ImagePlaces, RowImages
from trainer.rows.kept import Piece
from trainer.transfers import sent

Counts = npt.NDArray[np.int64]
Positions = Callable[[int, Sequence[ImageSpan]], Counts]
"""The positions of a sequence of so many tokens with these images, `[L]` or `[3, L]`."""
Run = tuple[int, int, int]
"""`(start, stop, end)`: all tokens from `start` to before `end` attend to the tokens of the range
`[start, stop)` that are not after them."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which of the `T` tokens of a micro-batch attend to which: a forest of paths.

    Example: [5 6 7] and [5 6 8 9] with their prefix shared, laid out as 5 6 7 8 9:
        ends = [5 5 3 5 5]     longest = 4
        runs = ((0, 2, 5), (2, 3, 3), (3, 5, 5))

    The row of a piece of a tree begins with `P` tokens of earlier pieces, those on the path to its
    first token, which were computed by other passes. Example: 8 9 alone, after 5 6:
        ends = [4 4 4 4]     longest = 4     segments = (2,)     last_ends = [4 4]     front = 2
    """

    last_ends: Tensor
    """`[K]` int64: the `ends` of all tokens but the first `front`."""
    longest: int
    """Number of tokens of the longest path."""
    segments: tuple[int, ...] = ()
    """Number of tokens of each earlier piece in front; their sum is `P`."""
    piece: Piece | None = None
    """What the passes over the tree hand on; None: the row is a whole tree."""
    borders: tuple[int, ...] = ()
    """Where a run ends even if the next has the same `ends`, besides at the end of a segment."""
    images: Tensor | None = None
    """`[P + T]` int64: the image of each token, whose tokens also see the later ones of it, and -1
    for text. None: no token sees a later one."""

    front: int = 0
    """Number of tokens of earlier pieces to which all after them attend: they end with the row."""

    @functools.cached_property
    def ends(self) -> Tensor:
        """`[P + T]` int64: token `i` attends to token `j` exactly if `j <= i < ends[j]`, or if both
        are of one of the `images`."""
        return (
            pad(self.last_ends, (self.front, 0), value=self.row) if self.front else self.last_ends
        )

    @property
    def row(self) -> int:
        """`P + T`."""
        return self.front + len(self.last_ends)

    @functools.cached_property
    def past(self) -> int:
        """`P`, the number of tokens in front that earlier passes computed."""
        return sum(self.segments)

    @property
    def tokens(self) -> int:
        """`T`, the number of tokens that this pass computes."""
        return self.row - self.past

    def to(self, device: torch.device) -> Self:
        """The same layout with its tensors on that device."""
        piece = None if self.piece is None else self.piece.to(device)
        images = None if self.images is None else sent(self.images, device)
        moved = replace(self, last_ends=sent(self.last_ends, device), piece=piece, images=images)
        if device != self.last_ends.device:  # derived here, because a GPU would be waited for
            moved.__dict__.update(runs=self.runs, parent_runs=self.parent_runs)
        return moved

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """The tokens in order, cut into runs where `ends` changes and where a segment ends."""
        before = [self.row if self.front else -1]
        changes = torch.diff(self.last_ends, prepend=self.last_ends.new_tensor(before)).nonzero()
        borders = {*self.borders, *accumulate(self.segments)}
        starts = sorted({0, *(changes[:, 0] + self.front).tolist(), *borders, self.row})
        in_front = bisect_left(starts, self.front)
        last = self.last_ends[[start - self.front for start in starts[in_front:-1]]].tolist()
        ends = [self.row] * in_front + last
        return tuple(zip(starts[:-1], starts[1:], ends, strict=True))

    @functools.cached_property
    def parents(self) -> Tensor:
        """`[P + T]` int64: the token before each token on its path; -1 at the start of a path."""
        parents = torch.arange(-1, self.row - 1)
        for run, parent in zip(self.runs, self.parent_runs, strict=True):
            parents[run[0]] = -1 if parent is None else self.runs[parent][1] - 1
        return sent(parents, self.last_ends.device)

    @functools.cached_property
    def parent_runs(self) -> tuple[int | None, ...]:
        """The run that each run continues; None at the start of a path."""
        parents: list[int | None] = []
        open_runs: list[int] = []
        for number, (start, _, _) in enumerate(self.runs):
            while open_runs and self.runs[open_runs[-1]][2] <= start:
                open_runs.pop()
            parents.append(open_runs[-1] if open_runs else None)
            open_runs.append(number)
        return tuple(parents)

    @functools.cached_property
    def depths(self) -> Tensor:
        """`[P + T]` int64: number of tokens before each token on its path."""
        depths = torch.empty(self.row, dtype=torch.int64)
        for (start, stop, _), parent in zip(self.runs, self.parent_runs, strict=True):
            first = 0 if parent is None else int(depths[self.runs[parent][1] - 1]) + 1
            depths[start:stop] = torch.arange(first, first + stop - start)
        return sent(depths, self.last_ends.device)

    @functools.cached_property
    def forked(self) -> Layout:
        """The same layout, in which a run also ends where a later piece begins a branch."""
        if self.piece is None or not len(self.piece.forks):
            return self
        rows = self.piece.open_rows[self.piece.forks] + self.past + 1
        return replace(self, borders=tuple(rows.tolist()))

    def path(self, run: int) -> Tensor:
        """Indices of the tokens before the run on its path, in order."""
        device = self.last_ends.device
        pieces = [torch.zeros(0, dtype=torch.int64, device=device)]
        parent = self.parent_runs[run]
        while parent is not None:
            pieces.append(torch.arange(*self.runs[parent][:2], device=device))
            parent = self.parent_runs[parent]
        return torch.cat(pieces[:1] + pieces[:0:-1])

    def windowed(self, window: int | None) -> int | None:
        """The window, or None if every path fits into it."""
        return None if window is None or window >= self.longest else window


def counted(tokens: int, _images: Sequence[ImageSpan] = ()) -> Counts:
    """The positions of text: each token's number in its sequence."""
    return np.arange(tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of packed sequences, and the tokens that are predicted in it.

    Example: the sequences [5 6 7] and [5 6 8 9], sampled from position 2 on, share their prefix:
        ids        = [5 6 7 8 9]     positions = [0 1 2 2 3]
        targets    = [0 1 2]         predictors = [1 1 3]
    """

    ids: Tensor
    """`[T]` int64, token ids; below 0 for those of images."""
    positions: Tensor
    """`[T]` int64, each token's position in its own sequence; `[3, T]` (time, row, column) for a
    model whose images have places in three dimensions."""
    layout: Layout
    """Which tokens attend to which."""
    targets: Tensor
    """`[M]` int64, indices of the batch's trained tokens that are predicted here; ascending."""
    predictors: Tensor
    """`[M]` int64, index in `[T]` of the token before each target."""
    experts: Tensor | None = None
    """`[T, L, K]` int32, the recorded experts of each layer; -1 for a token without a row. None: no
    token has any."""
    share: float = 1.0
    """The share of its input tokens among those of all micro-batches that were packed with it."""
    reads_only: bool = False
    """Whether the pass computes only what later ones attend to; it trains no token."""
    images: RowImages | None = None
    """Its image tokens; None: it is text alone."""

    @property
    def piece(self) -> Piece | None:
        """Its place in a tree that is computed in several passes; None: it is whole trees."""
        return self.layout.piece

    def to(self, device: torch.device) -> Self:
        """The same micro-batch with its tensors on that device."""
        return replace(
            self,
            ids=sent(self.ids, device),
            positions=sent(self.positions, device),
            layout=self.layout.to(device),
            targets=sent(self.targets, device),
            predictors=sent(self.predictors, device),
            experts=None if self.experts is None else sent(self.experts, device),
            images=None if self.images is None else self.images.to(device),
        )


def pack(
    batch: Batch,
    *,
    max_tokens: int,
    fill_tokens: int | None = None,
    share_prefixes: bool = False,
    sequences: Iterable[int] | None = None,
    multiple_of: int = 1,
    positions: Positions = counted,
) -> list[MicroBatch]:
    """The batch (or the `sequences` with these indices) as micro-batches, as `divide` divides
    it."""
    divided = divide(
        batch,
        max_tokens=max_tokens,
        fill_tokens=fill_tokens,
        share_prefixes=share_prefixes,
        sequences=sequences,
        multiple_of=multiple_of,
    )
    return lay_out(batch, divided, positions)


def divide(
    batch: Batch,
    *,
    max_tokens: int,
    fill_tokens: int | None = None,
    share_prefixes: bool = False,
    sequences: Iterable[int] | None = None,
    multiple_of: int = 1,
) -> list[RowPlan]:
    """Divides the batch (or the `sequences` with these indices) into micro-batches of at most
    `max_tokens`; returns the plan of each.

    Sequences without a common prefix are distributed evenly, up to `fill_tokens` each (None:
    `max_tokens`). A sequence longer than `max_tokens` has a micro-batch of its own. The number of
    micro-batches is a multiple of `multiple_of` (the data-parallel ranks), so that some may have no
    targets.
    """
    chosen = range(len(batch.sequences)) if sequences is None else list(sequences)
    if share_prefixes:
        units = _shared_units(batch, chosen, max_tokens)
    else:
        units = [Unit((index,), len(batch.sequences[index])) for index in chosen]
    bins = _balance(units, min(max_tokens, fill_tokens or max_tokens), multiple_of)
    total = max(1, sum(unit.tokens for unit in units))
    return [RowPlan(tuple(bin_), sum(unit.tokens for unit in bin_) / total) for bin_ in bins]


def lay_out(
    batch: Batch, divided: Iterable[RowPlan], positions: Positions = counted
) -> list[MicroBatch]:
    """The micro-batches with these plans, in the same order."""
    bounds = torch.searchsorted(batch.sequence, torch.arange(len(batch.sequences) + 1))
    return [_laid_out(batch, row, bounds, positions) for row in divided]


def _shared_units(batch: Batch, chosen: Iterable[int], max_tokens: int) -> list[Unit]:
    """Each group's sequences in depth-first order of their radix tree, cut to `max_tokens`.

    Sorting sequences by their ids gives that order. A sequence adds to the tree the tokens after
    the prefix that it shares with the previous sequence.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index in chosen:
        groups[int(batch.group[batch.sequence_rollout[index]])].append(index)
    units: list[Unit] = []
    for group in groups.values():
        group.sort(key=lambda index: batch.sequences[index].astype(">i4").tobytes())
        walk = [batch.sequences[index] for index in group]
        lengths = np.array([len(ids) for ids in walk])
        shared = np.array([0, *(shared_tokens(batch, a, b) for a, b in pairwise(group))])
        for start, stop, tokens in cut(lengths, shared, max_tokens):
            units.append(Unit(tuple(group[start:stop]), tokens))
    return units


def cut(lengths: Counts, shared: Counts, max_tokens: int) -> list[tuple[int, int, int]]:
    """Cuts sequences in depth-first order into parts of at most `max_tokens` input tokens.

    Returns `(start, stop, tokens)` of each part. `lengths[i]` is the number of tokens of sequence
    i, and `shared[i]` the length of the prefix that it shares with sequence i - 1. A part computes
    all of its first sequence, so that a cut before i costs `shared[i]` tokens. The chosen cuts have
    the lowest total cost and, among those, the fewest parts.
    """
    count = len(lengths)
    added = np.concatenate([[0], np.cumsum(lengths - shared)])
    alone = added[1:] - lengths  # part [start, stop) has `added[stop] - alone[start]` tokens
    price = shared.astype(np.int64) * (count + 1) + 1
    cheapest = np.zeros(count + 1, np.int64)
    starts = np.zeros(count + 1, np.int64)
    first = 0
    for stop in range(1, count + 1):
        while first < stop - 1 and added[stop] - alone[first] > max_tokens:
            first += 1
        costs = cheapest[first:stop] + price[first:stop]
        starts[stop] = first + int(costs.argmin())
        cheapest[stop] = costs.min()
    parts = []
    stop = count
    while stop:
        start = int(starts[stop])
        parts.append((start, stop, int(added[stop] - alone[start])))
        stop = start
    return parts[::-1]


def _balance(units: Sequence[Unit], full_tokens: int, multiple_of: int) -> list[list[Unit]]:
    """Distributes the units over as few bins as possible, evenly: takes the longest unit first, and
    puts it into the emptiest bin."""
    total = sum(unit.tokens for unit in units)
    count = min(-(-total // full_tokens), len(units))
    while True:
        count = max(1, -(-count // multiple_of)) * multiple_of
        bins: list[list[Unit]] = [[] for _ in range(count)]
        loads = [0] * count
        for unit in sorted(units, key=lambda unit: -unit.tokens):
            emptiest = loads.index(min(loads))
            bins[emptiest].append(unit)
            loads[emptiest] += unit.tokens
        if all(load <= full_tokens or len(b) == 1 for b, load in zip(bins, loads, strict=True)):
            return bins
        count += 1


def _laid_out(batch: Batch, row: RowPlan, bounds: Tensor, positions_of: Positions) -> MicroBatch:
    units = row.units
    if not units:  # models refuse 0 tokens, and 1 would be compiled as a constant
        two, none = torch.arange(2), torch.zeros(0, dtype=torch.int64)
        layout = Layout(torch.full_like(two, 2), longest=2)
        return MicroBatch(torch.zeros_like(two), two, layout, none, none, share=0.0)
    ids: list[Ids] = []
    positions: list[Counts] = []
    targets, predictors = ([np.zeros(0, np.int64)] for _ in range(2))
    ends = np.empty(sum(unit.tokens for unit in units), np.int64)
    experts = _no_experts(batch, units, len(ends))
    places = ImagePlaces(len(ends))
    used = 0
    for unit in units:
        previous: int | None = None
        path = np.zeros(0, np.int64)  # index in [T] of each token of the current sequence
        for index in unit.sequences:
            sequence, images = batch.sequences[index], batch.images_of(index)
            shared = shared_tokens(batch, previous, index)
            fresh = np.arange(used, used + len(sequence) - shared)
            ends[path[shared:]] = used
            path = np.concatenate([path[:shared], fresh])
            ids.append(sequence[shared:])
            positions.append(positions_of(len(sequence), images)[..., shared:])
            places.add(path, images, shared)
            trained = slice(int(bounds[index]), int(bounds[index + 1]))
            targets.append(np.arange(trained.start, trained.stop))
            predictors.append(path[batch.position[trained].numpy() - 1])
            if experts is not None and (routing := batch.routing[index]) is not None:
                # A prefix that several trials share has the rows of the first of them.
                new = routing.known & (experts[path, 0, 0] < 0)
                experts[path[new]] = routing.experts[new]
            used += len(fresh)
            previous = index
        ends[path] = used
    merged_ids = np.concatenate(ids).astype(np.int64)
    merged_targets = np.concatenate(targets)
    order = np.argsort(merged_targets, kind="stable")
    longest = max(len(batch.sequences[index]) for unit in units for index in unit.sequences)
    return MicroBatch(
        ids=torch.as_tensor(merged_ids),
        positions=torch.as_tensor(np.concatenate(positions, axis=-1)),
        layout=Layout(torch.as_tensor(ends), longest),
        targets=torch.as_tensor(merged_targets[order]),
        predictors=torch.as_tensor(np.concatenate(predictors)[order]),
        experts=None if experts is None else torch.as_tensor(experts),
        share=row.share,
        images=places.row(merged_ids),
    )


def _no_experts(batch: Batch, units: Sequence[Unit], tokens: int) -> npt.NDArray[np.int32] | None:
    """`[T, L, K]` of -1; None if no sequence of the units has recorded experts."""
    routings = (batch.routing[i] for unit in units for i in unit.sequences if batch.routing)
    some = next((routing for routing in routings if routing is not None), None)
    if some is None:
        return None
    return np.full((tokens, *some.experts.shape[1:]), -1, np.int32)


def shared_tokens(batch: Batch, first: int | None, second: int) -> int:
    """Number of tokens in the common prefix of two sequences of the batch, which cuts no image; 0
    without a first."""
    if first is None:
        return 0
    shared = common_prefix(batch.sequences[first], batch.sequences[second])
    return uncut(batch.images_of(second), shared)


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of tokens in the common prefix of two sequences."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
