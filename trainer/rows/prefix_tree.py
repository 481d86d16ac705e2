"""Divides a batch into micro-batches that compute a shared prefix once, however long it is.

`trainer.rows.packing` shares a prefix within a micro-batch. Where that repeats tokens, the
sequences of all groups become one radix tree, whose tokens stand in depth-first order:

    order    0 …… 18,899 | 0 …… 299 | 0 …… 299 | …     a prefix, and what each of 8 trials adds
    pieces   ──────┤├─────────────────────────────

Any interval of this order is a piece that one pass can compute: what its tokens attend to outside
of it is one path, that of its first token, and all of this path stands before it. A piece whose
tokens later ones attend to (an inner piece) has two passes: the first computes only these tokens
and keeps their keys and values, and the second, after all pieces that read them, computes all of
its tokens with their gradients (`trainer.rows.kept`). Others have one.

Invariant: each token of the tree is computed exactly once with its gradient, in a pass of at most
`max_tokens`. Loss and gradient are those of the sequences one by one.

Shapes: `A` tokens of the tree, `S` sequences, `N` trained tokens of the batch, `P` tokens before a
piece on its path, `T` tokens of a piece.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from trainer.batch import Batch, PiecePlan, RowPlan, Unit
from trainer.rows.images import ImagePlaces
from trainer.rows.kept import Kept, Piece
from trainer.rows.packing import Layout, MicroBatch, Positions, counted, shared_tokens
from trainer.rows.packing import divide as divide_whole
from trainer.rows.packing import lay_out as lay_out_whole

Counts = npt.NDArray[np.int64]

READ_COST = 1 / 3
"""Cost of a token of a pass without a backward pass, whose products are a third of all."""
LEAST_GAIN = 0.02
"""Share of the tokens that pieces must save. Below, the passes that depend on each other and the
kept keys are not worth it."""
PASS_SHARE = 32
"""A pass costs as much as one of so many parts of `max_tokens`, whatever its size: launches, and
matrices that do not fill the device."""
LONG_RUN_CUTS = 32
"""A run of tokens may be cut at every so many parts of `max_tokens`, besides at its ends."""


def divide(
    batch: Batch,
    *,
    max_tokens: int,
    fill_tokens: int | None = None,
    share_prefixes: bool = False,
    in_pieces: bool = False,
    sequences: Iterable[int] | None = None,
    multiple_of: int = 1,
) -> list[RowPlan]:
    """As `trainer.rows.packing.divide`, and with `in_pieces` a tree in pieces if that computes
    fewer tokens. The rows of rank `r` of `multiple_of` are every `multiple_of`-th from `r` on;
    those of all ranks are passes of the same kinds in the same order."""
    chosen = range(len(batch.sequences)) if sequences is None else list(sequences)
    whole = divide_whole(
        batch,
        max_tokens=max_tokens,
        fill_tokens=fill_tokens,
        share_prefixes=share_prefixes,
        sequences=chosen,
        multiple_of=multiple_of,
    )
    if not (in_pieces and share_prefixes) or not chosen:
        return whole
    forest = Forest.of(batch, chosen)
    computed = sum(unit.tokens for row in whole for unit in row.units)
    if forest.tokens > (1 - LEAST_GAIN) * computed:
        return whole
    trees = [forest.part(*bounds) for bounds in forest.shares(multiple_of)]
    cuts = [cut(tree, max_tokens) for tree in trees]
    cost = sum(_cost(tree, bounds) for tree, bounds in zip(trees, cuts, strict=True))
    if cost > (1 - LEAST_GAIN) * computed:
        return whole
    return _together([_rows(*each) for each in zip(range(multiple_of), trees, cuts, strict=True)])


def lay_out(
    batch: Batch,
    divided: Iterable[RowPlan],
    *,
    prefix_bytes: int | None = None,
    positions: Positions = counted,
) -> list[MicroBatch]:
    """The micro-batches with these plans, in the same order, in which they must be trained.
    `prefix_bytes`: the most of a GPU's memory for keys and values of inner pieces; None: all."""
    rows = list(divided)
    trees = sorted({row.piece.tree for row in rows if row.piece is not None})
    laid = {tree: _LaidTree.of(batch, rows, tree, prefix_bytes, positions) for tree in trees}
    whole = [row for row in rows if row.piece is None]
    micros = iter(lay_out_whole(batch, whole, positions))
    return [
        replace(next(micros), reads_only=row.reads_only)
        if row.piece is None
        else laid[row.piece.tree].micro_batch(row)
        for row in rows
    ]


def in_reading_order(micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The passes that compute each token once without a backward pass: every micro-batch that
    trains tokens, earlier pieces of a tree first. All ranks have the same number of them. Frees
    what earlier pieces kept for none of those that follow."""
    once = [micro for micro in micros if not micro.reads_only]
    once.sort(key=lambda micro: -1 if micro.piece is None else micro.piece.number)
    for micro in once:
        if micro.piece is not None:
            micro.piece.forget_others()
        yield micro


@dataclass(frozen=True, slots=True)
class Forest:
    """Sequences in depth-first order of their radix tree.

    Example: [5 6 7] and [5 6 8 9]: Forest(order=[0 1], lengths=[3 4], shared=[0 2])
    """

    order: Counts
    """`[S]`, indices of the sequences in the batch."""
    lengths: Counts
    """`[S]`, their numbers of tokens."""
    shared: Counts
    """`[S]`, the tokens that each shares with the one before it; 0 for the first."""

    @classmethod
    def of(cls, batch: Batch, chosen: Iterable[int]) -> Forest:
        """The tree of these sequences. Sorting them by their ids gives the order."""
        order = sorted(chosen, key=lambda index: batch.sequences[index].astype(">i4").tobytes())
        lengths = [len(batch.sequences[index]) for index in order]
        shared = [0, *(shared_tokens(batch, a, b) for a, b in pairwise(order))][: len(order)]
        return cls(*(np.array(x, np.int64) for x in (order, lengths, shared)))

    @property
    def tokens(self) -> int:
        """`A`, its number of tokens."""
        return int((self.lengths - self.shared).sum())

    @property
    def starts(self) -> Counts:
        """`[S + 1]`, where the own tokens of each sequence begin in the order."""
        return np.concatenate([[0], np.cumsum(self.lengths - self.shared)])

    def part(self, start: int, stop: int) -> Forest:
        """The tree of some consecutive sequences."""
        shared = self.shared[start:stop].copy()
        shared[:1] = 0
        return Forest(self.order[start:stop], self.lengths[start:stop], shared)

    def shares(self, count: int) -> list[tuple[int, int]]:
        """Bounds of `count` parts with trees of about the same size, the largest as small as
        possible; some may be empty."""
        added = self.starts
        low, high = int(self.lengths.max()), int(added[-1])
        while low < high:
            middle = (low + high) // 2
            if len(self._filled(middle, added)) <= count:
                high = middle
            else:
                low = middle + 1
        bounds = self._filled(low, added)
        return bounds + [(len(self.order),) * 2] * (count - len(bounds))

    def _filled(self, limit: int, added: Counts) -> list[tuple[int, int]]:
        bounds: list[tuple[int, int]] = []
        start = 0
        while start < len(self.order):
            # part [start, stop) has `added[stop] - added[start] + shared[start]` tokens
            room = limit + added[start] - self.shared[start]
            stop = max(start + 1, int(np.searchsorted(added, room, side="right")) - 1)
            stop = min(stop, len(self.order))
            bounds.append((start, stop))
            start = stop
        return bounds


def cut(tree: Forest, max_tokens: int) -> Counts:
    """The bounds of the pieces, from 0 to `A`: those that cost least.

    A cut before token `b` keeps the tokens on the path of `b` that stand in the piece before it,
    and each costs a pass without gradients. The number of these is the depth of `b` less the least
    depth within the piece, because the path of its first token is left there.
    """
    at, depth = _candidates(tree, max_tokens)
    count = len(at)
    pass_cost = max_tokens / PASS_SHARE
    cheapest = np.zeros(count)
    before = np.zeros(count, np.int64)
    first = 0
    for stop in range(1, count):
        while at[stop] - at[first] > max_tokens:
            first += 1
        least = np.minimum.accumulate(depth[first : stop + 1][::-1])[::-1][:-1]
        kept = np.maximum(depth[stop] - least, 0)
        costs = cheapest[first:stop] + READ_COST * kept + pass_cost * (1 + (kept > 0))
        best = len(costs) - 1 - int(costs[::-1].argmin())
        cheapest[stop], before[stop] = costs[best], first + best
    bounds = [count - 1]
    while bounds[-1]:
        bounds.append(int(before[bounds[-1]]))
    return at[bounds[::-1]]


def _candidates(tree: Forest, max_tokens: int) -> tuple[Counts, Counts]:
    """Where the order may be cut, from 0 to `A`, and the depth of the token there."""
    step = max(1, max_tokens // LONG_RUN_CUTS)
    at: list[Counts] = []
    depth: list[Counts] = []
    for start, own, shared in zip(
        tree.starts[:-1], tree.lengths - tree.shared, tree.shared, strict=True
    ):
        offsets = np.arange(0, own, step)
        at.append(start + offsets)
        depth.append(shared + offsets)
    at.append(tree.starts[-1:])
    depth.append(np.zeros(1, np.int64))
    return np.concatenate(at), np.concatenate(depth)


def _cost(tree: Forest, bounds: Counts) -> float:
    """In tokens with their gradient."""
    return tree.tokens + READ_COST * sum(stop - start for _, start, stop in _stems(tree, bounds))


def _stems(tree: Forest, bounds: Counts) -> list[tuple[int, int, int]]:
    """`(piece, start, stop)`: the depths of the tokens that each inner piece keeps."""
    starts = tree.starts[:-1]
    found = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        # the depths at the cuts, and at the first own token of each sequence in between
        low, high = _depth(tree, int(first)), _depth(tree, int(last))
        inner = tree.shared[(starts > first) & (starts < last) & (tree.lengths > tree.shared)]
        least = min(low, high, int(inner.min(initial=low)))
        if high > least:
            found.append((number, least, high))
    return found


def _depth(tree: Forest, token: int) -> int:
    """The number of tokens before this one on its path; 0 after the last one."""
    starts = tree.starts
    if token >= starts[-1]:
        return 0
    sequence = int(np.searchsorted(starts, token, side="right")) - 1
    return int(tree.shared[sequence] + token - starts[sequence])


def _rows(number: int, tree: Forest, bounds: Counts) -> list[RowPlan]:
    """The passes over a tree in the order in which they are trained."""
    stems = {piece: (start, stop) for piece, start, stop in _stems(tree, bounds)}
    total = max(1, tree.tokens)
    homes = np.searchsorted(bounds, tree.starts[:-1], side="right") - 1
    homes = np.minimum(homes, len(bounds) - 2)
    rows: list[RowPlan] = []
    waiting: list[int] = []

    def train(piece: int) -> None:
        start, stop = int(bounds[piece]), int(bounds[piece + 1])
        unit = Unit(tuple(tree.order[homes == piece].tolist()), stop - start)
        plan = PiecePlan(number, start, stop)
        rows.append(RowPlan((unit,), (stop - start) / total, plan))

    for piece, (start, stop) in enumerate(pairwise(bounds.tolist())):
        depth = _depth(tree, start)
        while waiting and stems[waiting[-1]][0] >= depth:
            train(waiting.pop())
        if piece in stems:
            rows.append(RowPlan((), 0.0, PiecePlan(number, start, stop), reads_only=True))
            waiting.append(piece)
        else:
            train(piece)
    while waiting:
        train(waiting.pop())
    return rows


def _together(ranks: Sequence[Sequence[RowPlan]]) -> list[RowPlan]:
    """The rows of all ranks in turn. Where a rank has no pass of the kind that others compute, it
    computes a row without sequences: the layers of all ranks communicate in each pass."""
    tokens = [sum(unit.tokens for row in rows for unit in row.units) for rows in ranks]
    total = max(1, sum(tokens))
    left = [list(rows) for rows in ranks]
    found: list[RowPlan] = []
    while any(left):
        reads = any(rows and rows[0].reads_only for rows in left)
        for rows, own in zip(left, tokens, strict=True):
            if rows and rows[0].reads_only == reads:
                row = rows.pop(0)
                found.append(replace(row, share=row.share * own / total))
            else:
                found.append(RowPlan((), 0.0, reads_only=reads))
    return found


@dataclass(frozen=True, slots=True)
class _LaidTree:
    """A tree in depth-first order, and its pieces."""

    batch: Batch
    bounds: Counts
    """The bounds of the pieces."""
    ids: Counts
    """`[A]`"""
    depths: Counts
    """`[A]`, number of tokens before each on its path."""
    positions: Counts
    """`[A]` or `[3, A]`"""
    images: ImagePlaces
    """Of all `A` tokens."""
    ends: Counts
    """`[A]`: as those of a layout of the whole tree."""
    paths: tuple[Counts, ...]
    """For each bound, the tokens on the path of the token there, `[P]`; empty for the last."""
    targets: Counts
    """`[N']`, the trained tokens of its sequences."""
    predictors: Counts
    """`[N']`, the token that predicts each."""
    homes: Counts
    """`[N']`, the piece of each predictor; ascending within a sequence."""
    trained: tuple[Counts, ...]
    """For each piece, the targets whose predictors it holds, as indices in `[N']`; ascending."""
    sequence: Counts
    """`[N']`, the sequence of each target; ascending."""
    experts: npt.NDArray[np.int32] | None
    """`[A, L, K]`"""
    kept: Kept

    @classmethod
    def of(
        cls,
        batch: Batch,
        rows: Sequence[RowPlan],
        tree: int,
        room: int | None,
        positions_of: Positions,
    ) -> _LaidTree:
        """The tree with this number, from the rows that train it."""
        own = [
            (row.piece.start, row.piece.stop, row.units)
            for row in rows
            if row.piece is not None and row.piece.tree == tree and not row.reads_only
        ]
        own.sort()
        bounds = np.array([0, *(stop for _, stop, _ in own)], np.int64)
        order = [i for _, _, units in own for unit in units for i in unit.sequences]
        total = int(bounds[-1])
        of_sequence = np.searchsorted(batch.sequence.numpy(), np.arange(len(batch.sequences) + 1))
        ids, depths, ends = (np.empty(total, np.int64) for _ in range(3))
        positions: list[Counts] = []
        places = ImagePlaces(total)
        experts = _no_experts(batch, order, total)
        targets: list[Counts] = [np.zeros(0, np.int64)]
        predictors: list[Counts] = [np.zeros(0, np.int64)]
        paths: list[Counts] = []
        previous: int | None = None
        path, used = np.zeros(0, np.int64), 0
        for index in order:
            sequence, images = batch.sequences[index], batch.images_of(index)
            shared = shared_tokens(batch, previous, index)
            stop = used + len(sequence) - shared
            ends[path[shared:]] = used
            path = np.concatenate([path[:shared], np.arange(used, stop)])
            ids[used:stop], depths[used:stop] = sequence[shared:], np.arange(shared, len(path))
            positions.append(positions_of(len(sequence), images)[..., shared:])
            places.add(path, images, shared)
            while len(paths) < len(bounds) - 1 and bounds[len(paths)] < stop:
                paths.append(path[: shared + bounds[len(paths)] - used])
            trained = np.arange(of_sequence[index], of_sequence[index + 1])
            targets.append(trained)
            predictors.append(path[batch.position.numpy()[trained] - 1])
            if experts is not None and (routing := batch.routing[index]) is not None:
                # A prefix that several trials share has the rows of the first of them.
                new = routing.known & (experts[path, 0, 0] < 0)
                experts[path[new]] = routing.experts[new]
            previous, used = index, stop
        ends[path] = used
        paths.append(np.zeros(0, np.int64))
        merged = np.concatenate(targets)
        by_target = np.argsort(merged, kind="stable")
        merged, by_token = merged[by_target], np.concatenate(predictors)[by_target]
        homes = np.searchsorted(bounds, by_token, side="right") - 1
        by_home = np.argsort(homes, kind="stable")
        first_of_home = np.searchsorted(homes[by_home], np.arange(1, len(bounds) - 1))
        return cls(
            batch,
            bounds,
            ids,
            depths,
            np.concatenate(positions, axis=-1),
            places,
            ends,
            tuple(paths),
            merged,
            by_token,
            homes,
            tuple(np.split(by_home, first_of_home)),
            batch.sequence.numpy()[merged],
            experts,
            Kept(room),
        )

    def micro_batch(self, row: RowPlan) -> MicroBatch:
        """The pass over a piece, or over what later pieces read of it."""
        assert row.piece is not None
        start, stop = row.piece.start, row.piece.stop
        number = int(np.searchsorted(self.bounds, start))
        path, after = self.paths[number], self.paths[number + 1]
        open_tokens = after[slice(*np.searchsorted(after, (start, stop)))]
        tokens = np.arange(start, stop)
        if row.reads_only:
            tokens = open_tokens
            path = path[: self.depths[open_tokens[0]]]
        last = int(tokens[-1])
        # On a path, later tokens end earlier: those that end within the piece are its last ones.
        front = bisect_left(path, True, key=lambda token: self.ends[token] <= last)
        seen_until = np.concatenate([self.ends[path[front:]], self.ends[tokens]])
        ends = len(path) + np.searchsorted(tokens, seen_until)
        own, predictors, companions, finished = self._trained(number, tokens, row.reads_only)
        longest = max(len(path), int(self.depths[tokens].max()) + 1)
        past = self._segments(path)
        # a branch begins where the path of what follows ends
        forks = np.flatnonzero(np.diff(self.ends[open_tokens], append=-1))
        piece = Piece(
            number=number,
            past=past,
            open_rows=torch.as_tensor(np.searchsorted(tokens, open_tokens)),
            forks=torch.as_tensor(forks),
            kept=self.kept,
            companions=torch.as_tensor(companions),
            finished=torch.as_tensor(finished),
        )
        layout = Layout(
            torch.as_tensor(ends), longest, tuple(count for _, count in past), piece, front=front
        )
        return MicroBatch(
            ids=torch.as_tensor(self.ids[tokens]),
            positions=torch.as_tensor(self.positions[..., tokens]),
            layout=layout,
            targets=torch.as_tensor(own),
            predictors=torch.as_tensor(predictors),
            experts=None if self.experts is None else torch.as_tensor(self.experts[tokens]),
            share=row.share,
            reads_only=row.reads_only,
            images=self.images.row(self.ids[tokens], tokens),
        )

    def _segments(self, path: Counts) -> tuple[tuple[int, int], ...]:
        """`(piece, tokens)` of each earlier piece on a path."""
        counts = np.diff(np.searchsorted(path, self.bounds))
        pieces = np.flatnonzero(counts)
        return tuple(zip(pieces.tolist(), counts[pieces].tolist(), strict=True))

    def _trained(
        self, number: int, tokens: Counts, reads_only: bool
    ) -> tuple[Counts, Counts, Counts, Counts]:
        """`(targets, predictors, companions, finished)` of a pass over these tokens; the predictors
        are indices in the pass. A pass that only reads scores what others need as companions."""
        here = self.trained[number]
        sequences, counts = np.unique(self.sequence[here], return_counts=True)
        first, last = np.searchsorted(self.sequence, (sequences, sequences + 1))
        if reads_only:
            divided = np.isin(self.sequence[here], sequences[last - first > counts])
            here = here[divided & np.isin(self.predictors[here], tokens)]
            none = np.zeros(0, np.int64)
            at = np.searchsorted(tokens, self.predictors[here])
            return self.targets[here], at, none, none
        at = np.searchsorted(tokens, self.predictors[here])
        elsewhere, finished = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for own in map(slice, first.tolist(), last.tolist()):
            homes, targets = self.homes[own], self.targets[own]
            begin, end = np.searchsorted(homes, (number, number + 1))
            elsewhere += [targets[:begin], targets[end:]]
            # The passes of a sequence are trained from its last piece to its first.
            if begin == 0:
                finished.append(targets)
        return self.targets[here], at, np.concatenate(elsewhere), np.concatenate(finished)


def _no_experts(batch: Batch, order: Sequence[int], tokens: int) -> npt.NDArray[np.int32] | None:
    """`[A, L, K]` of -1; None if no sequence has recorded experts."""
    routings = (batch.routing[index] for index in order if batch.routing)
    some = next((routing for routing in routings if routing is not None), None)
    if some is None:
        return None
    return np.full((tokens, *some.experts.shape[1:]), -1, np.int32)
