"""Sequences → packed micro-batches: whole sequences, several to a row, no padding.

Invariant: every trained token of the chosen sequences is a target of exactly one micro-batch, and
the token that predicts it sees its own sequence's past and nothing else. With `share_prefixes` the
sequences of a group are laid out as a radix tree, each common prefix once; what a token sees, its
position and its targets stay the same, so loss and gradients do too.

Shapes: `T` input tokens of a micro-batch, `M` of the batch's `N` trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proxy.records import Ids
from trainer.attention import Layout, Piece, Span
from trainer.batch import Batch


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
    share_prefixes: bool = False,
    sequences: Iterable[int] | None = None,
    multiple_of: int = 1,
) -> list[MicroBatch]:
    """The batch (or some of its `sequences`) as micro-batches of at most `max_tokens` each.

    Their sizes are balanced; a sequence longer than `max_tokens` has one for itself. Their number
    is a multiple of `multiple_of` (the data-parallel ranks): some may hold no target.
    """
    chosen = range(len(batch.sequences)) if sequences is None else list(sequences)
    if share_prefixes:
        units = _shared_units(batch, chosen, max_tokens)
    else:
        units = [_Unit((index,), len(batch.sequences[index])) for index in chosen]
    bins = _balance(units, max_tokens, multiple_of)
    bounds = torch.searchsorted(batch.sequence, torch.arange(len(batch.sequences) + 1))
    return [_lay_out(batch, bin_, bounds, share_prefixes) for bin_ in bins]


def _shared_units(batch: Batch, chosen: Iterable[int], max_tokens: int) -> list[_Unit]:
    """Each group's sequences in the order of a walk through their radix tree, cut to size.

    Sorted by their ids, sequences are in depth-first order, and what one adds to the tree is
    what comes after its common prefix with the one before.
    """
    order = sorted(
        chosen, key=lambda i: (_group(batch, i), batch.sequences[i].astype(">i4").tobytes())
    )
    units: list[_Unit] = []
    current: list[int] = []
    tokens = 0
    for index in order:
        ids = batch.sequences[index]
        joins = bool(current) and _group(batch, current[-1]) == _group(batch, index)
        added = len(ids) - (common_prefix(batch.sequences[current[-1]], ids) if joins else 0)
        if current and (not joins or tokens + added > max_tokens):
            units.append(_Unit(tuple(current), tokens))
            current, tokens, added = [], 0, len(ids)
        current.append(index)
        tokens += added
    return [*units, _Unit(tuple(current), tokens)] if current else units


def _group(batch: Batch, sequence: int) -> int:
    return int(batch.group[batch.sequence_rollout[sequence]])


def _balance(units: Sequence[_Unit], max_tokens: int, multiple_of: int) -> list[list[_Unit]]:
    """As few bins as fit, evenly full: longest first, each into the emptiest bin."""
    total = sum(unit.tokens for unit in units)
    count = -(-total // max_tokens)
    while True:
        count = max(1, -(-count // multiple_of)) * multiple_of
        bins: list[list[_Unit]] = [[] for _ in range(count)]
        loads = [0] * count
        for unit in sorted(units, key=lambda unit: -unit.tokens):
            emptiest = loads.index(min(loads))
            bins[emptiest].append(unit)
            loads[emptiest] += unit.tokens
        if all(load <= max_tokens or len(b) == 1 for b, load in zip(bins, loads, strict=True)):
            return bins
        count += 1


def _lay_out(
    batch: Batch, units: Sequence[_Unit], bounds: Tensor, share_prefixes: bool
) -> MicroBatch:
    ids: list[Ids] = [np.zeros(0, np.int32)]
    positions, targets, predictors = ([np.zeros(0, np.int64)] for _ in range(3))
    spans: list[Span] = []
    used = 0
    for unit in units:
        previous = np.zeros(0, np.int32)
        path = np.zeros(0, np.int64)  # index in [T] of each token of the current sequence
        pieces: tuple[Piece, ...] = ()
        for index in unit.sequences:
            sequence = batch.sequences[index]
            shared = common_prefix(previous, sequence) if share_prefixes else 0
            fresh = len(sequence) - shared
            pieces = _truncate(pieces, shared)
            path = np.concatenate([path[:shared], np.arange(used, used + fresh)])
            if fresh:
                spans.append(Span(used, used + fresh, pieces))
                pieces = (*pieces, (len(spans) - 1, fresh))
            ids.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence)))
            trained = slice(int(bounds[index]), int(bounds[index + 1]))
            targets.append(np.arange(trained.start, trained.stop))
            predictors.append(path[batch.position[trained].numpy() - 1])
            used += fresh
            previous = sequence
    if not units:  # models do not take 0 tokens: one that nobody is to predict from
        ids, positions, spans = [np.zeros(1, np.int32)], [np.zeros(1, np.int64)], [Span(0, 1)]
    merged_targets = np.concatenate(targets)
    order = np.argsort(merged_targets, kind="stable")
    return MicroBatch(
        ids=torch.as_tensor(np.concatenate(ids).astype(np.int64)),
        positions=torch.as_tensor(np.concatenate(positions)),
        layout=Layout(tuple(spans)),
        targets=torch.as_tensor(merged_targets[order]),
        predictors=torch.as_tensor(np.concatenate(predictors)[order]),
    )


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences start with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _truncate(pieces: Iterable[Piece], tokens: int) -> tuple[Piece, ...]:
    """The first `tokens` tokens of a path."""
    kept: list[Piece] = []
    for span, length in pieces:
        if tokens <= 0:
            break
        kept.append((span, min(length, tokens)))
        tokens -= length
    return tuple(kept)
