"""Sequences → packed micro-batches: whole sequences, several to a row, no padding.

Invariant: every trained token of the chosen sequences is a target of exactly one micro-batch, and
the token that predicts it sees its own sequence's past and nothing else. With `share_prefixes` the
sequences of a group are laid out as a radix tree, each common prefix once; what a token sees, its
position and its targets stay the same, so loss and gradients do too.

Shapes: `T` input tokens of a micro-batch, `M` of the batch's `N` trained tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proxy.records import Ids
from trainer.batch import Batch
from trainer.policy.attention import Layout

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of packed sequences, and what is to be predicted in it.

    Example: the sequences [5 6 7] and [5 6 8 9], sampled from position 2 on, share their prefix:
        ids        = [5 6 7 8 9]     positions = [0 1 2 2 3]
        targets    = [0 1 2]         predictors = [1 1 3]
    """

    ids: Tensor
    """`[T]` int64."""
    positions: Tensor
    """`[T]` int64, each token's position in its own sequence."""
    layout: Layout
    """Who sees whom."""
    targets: Tensor
    """`[M]` int64, which of the batch's trained tokens are predicted here; ascending."""
    predictors: Tensor
    """`[M]` int64, index in `[T]` of the token before each target."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.ids.to(device),
            self.positions.to(device),
            self.layout.to(device),
            self.targets.to(device),
            self.predictors.to(device),
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """Sequences that are laid out together, and the tokens that they take."""

    sequences: tuple[int, ...]
    tokens: int


def pack(
    batch: Batch,
    *,
    max_tokens: int,
    fill_tokens: int | None = None,
    share_prefixes: bool = False,
    sequences: Iterable[int] | None = None,
    multiple_of: int = 1,
) -> list[MicroBatch]:
    """The batch (or some of its `sequences`) as micro-batches of at most `max_tokens` each.

    What shares no prefix is put together up to `fill_tokens` (None: `max_tokens`), evenly. A
    sequence longer than `max_tokens` has a micro-batch for itself. Their number is a multiple of
    `multiple_of` (the data-parallel ranks): some may hold no target.
    """
    chosen = range(len(batch.sequences)) if sequences is None else list(sequences)
    if share_prefixes:
        units = _shared_units(batch, chosen, max_tokens)
    else:
        units = [_Unit((index,), len(batch.sequences[index])) for index in chosen]
    bins = _balance(units, min(max_tokens, fill_tokens or max_tokens), multiple_of)
    bounds = torch.searchsorted(batch.sequence, torch.arange(len(batch.sequences) + 1))
    return [_lay_out(batch, bin_, bounds, share_prefixes) for bin_ in bins]


def _shared_units(batch: Batch, chosen: Iterable[int], max_tokens: int) -> list[_Unit]:
    """Each group's sequences in the order of a walk through their radix tree, cut to size.

    Sorted by their ids, sequences are in depth-first order, and what one adds to the tree is
    what comes after its common prefix with the one before.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index in chosen:
        groups[int(batch.group[batch.sequence_rollout[index]])].append(index)
    units: list[_Unit] = []
    for group in groups.values():
        group.sort(key=lambda index: batch.sequences[index].astype(">i4").tobytes())
        walk = [batch.sequences[index] for index in group]
        lengths = np.array([len(ids) for ids in walk])
        shared = np.array([0, *(common_prefix(a, b) for a, b in pairwise(walk))])
        for start, stop, tokens in cut(lengths, shared, max_tokens):
            units.append(_Unit(tuple(group[start:stop]), tokens))
    return units


def cut(lengths: Counts, shared: Counts, max_tokens: int) -> list[tuple[int, int, int]]:
    """A walk through a tree in parts of at most `max_tokens`: `(start, stop, tokens)` of each.

    `lengths[i]` are the tokens of sequence i and `shared[i]` those that it starts with in common
    with sequence i - 1. A part computes its first sequence whole, so that a cut before i costs
    `shared[i]` tokens: of all ways to cut, it is the one that costs least, in the fewest parts.
    """
    count = len(lengths)
    added = np.concatenate([[0], np.cumsum(lengths - shared)])
    alone = added[1:] - lengths  # [start, stop) takes `added[stop] - alone[start]` tokens
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


def _balance(units: Sequence[_Unit], full_tokens: int, multiple_of: int) -> list[list[_Unit]]:
    """As few bins as fit, evenly full: longest first, each into the emptiest bin."""
    total = sum(unit.tokens for unit in units)
    count = min(-(-total // full_tokens), len(units))
    while True:
        count = max(1, -(-count // multiple_of)) * multiple_of
        bins: list[list[_Unit]] = [[] for _ in range(count)]
        loads = [0] * count
        for unit in sorted(units, key=lambda unit: -unit.tokens):
            emptiest = loads.index(min(loads))
            bins[emptiest].append(unit)
            loads[emptiest] += unit.tokens
        if all(load <= full_tokens or len(b) == 1 for b, load in zip(bins, loads, strict=True)):
            return bins
        count += 1


def _lay_out(
    batch: Batch, units: Sequence[_Unit], bounds: Tensor, share_prefixes: bool
) -> MicroBatch:
    if not units:  # models do not take 0 tokens: one that nobody is to predict from
        one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        return MicroBatch(one, one, Layout(one + 1, longest=1), none, none)
    ids: list[Ids] = []
    positions, targets, predictors = ([np.zeros(0, np.int64)] for _ in range(3))
    ends = np.empty(sum(unit.tokens for unit in units), np.int64)
    used = 0
    for unit in units:
        previous = np.zeros(0, np.int32)
        path = np.zeros(0, np.int64)  # index in [T] of each token of the current sequence
        for index in unit.sequences:
            sequence = batch.sequences[index]
            shared = common_prefix(previous, sequence) if share_prefixes else 0
            fresh = np.arange(used, used + len(sequence) - shared)
            ends[path[shared:]] = used
            path = np.concatenate([path[:shared], fresh])
            ids.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence)))
            trained = slice(int(bounds[index]), int(bounds[index + 1]))
            targets.append(np.arange(trained.start, trained.stop))
            predictors.append(path[batch.position[trained].numpy() - 1])
            used += len(fresh)
            previous = sequence
        ends[path] = used
    merged_targets = np.concatenate(targets)
    order = np.argsort(merged_targets, kind="stable")
    longest = max(len(batch.sequences[index]) for unit in units for index in unit.sequences)
    return MicroBatch(
        ids=torch.as_tensor(np.concatenate(ids).astype(np.int64)),
        positions=torch.as_tensor(np.concatenate(positions)),
        layout=Layout(torch.as_tensor(ends), longest),
        targets=torch.as_tensor(merged_targets[order]),
        predictors=torch.as_tensor(np.concatenate(predictors)[order]),
    )


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences start with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
