"""The part of a batch that one rank computes.

Invariant: every sequence of a batch that is divided over the ranks, with all of its tokens, is in
exactly one part. A part is a batch of its own, whose sequences and tokens have the same order as in
the whole batch, and it holds nothing of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from trainer.batch import Batch, RowPlan, Unit

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """Some of the sequences of a batch."""

    batch: Batch
    """These sequences only."""
    tokens: Tensor
    """`[n]` int64: index in the whole batch of each trained token of the part; ascending."""


def part_of(batch: Batch, sequences: Iterable[int]) -> BatchPart:
    """The part with these sequences of the batch."""
    chosen = torch.tensor(sorted(sequences), dtype=torch.int64)
    tokens = torch.isin(batch.sequence, chosen).nonzero()[:, 0]
    rollouts, owners = torch.unique(batch.sequence_rollout[chosen], return_inverse=True)

    def of_token(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[tokens]

    return BatchPart(
        replace(
            batch,
            trial_ids=_chosen(batch.trial_ids, rollouts),
            prefixes=_chosen(batch.prefixes, rollouts),
            sources=_chosen(batch.sources, rollouts),
            group=batch.group[rollouts],
            rewards=batch.rewards[rollouts],
            trial_rewards=batch.trial_rewards[rollouts],
            sequences=_chosen(batch.sequences, chosen),
            routing=_chosen(batch.routing, chosen),
            sequence_rollout=owners,
            sequence=torch.searchsorted(chosen, batch.sequence[tokens]),
            position=batch.position[tokens],
            ids=batch.ids[tokens],
            turns=batch.turns[tokens],
            logprobs=batch.logprobs[tokens],
            versions=batch.versions[tokens],
            returns=batch.returns[tokens],
            shares=batch.shares[tokens],
            prox_logprobs=of_token(batch.prox_logprobs),
            entropies=of_token(batch.entropies),
            ref_logprobs=of_token(batch.ref_logprobs),
            teacher_logprobs=of_token(batch.teacher_logprobs),
            values=of_token(batch.values),
            advantages=of_token(batch.advantages),
            value_targets=of_token(batch.value_targets),
        ),
        tokens,
    )


def part_in_micro_batches(batch: Batch, micro_batches: Sequence[RowPlan]) -> BatchPart:
    """The part with the sequences of these micro-batches, which it keeps."""
    sequences = sorted(i for row in micro_batches for unit in row.units for i in unit.sequences)
    index = {sequence: number for number, sequence in enumerate(sequences)}
    part = part_of(batch, sequences)

    def in_part(unit: Unit) -> Unit:
        return replace(unit, sequences=tuple(index[each] for each in unit.sequences))

    part.batch.micro_batches = tuple(
        replace(row, units=tuple(map(in_part, row.units))) for row in micro_batches
    )
    return part


def joined(parts: Sequence[BatchPart], columns: Sequence[Tensor]) -> Tensor:
    """The column of the whole batch, from the columns of all of its parts. Ranks that compute a
    part together have equal parts and columns."""
    last = (int(part.tokens[-1]) for part in parts if len(part.tokens))
    whole = torch.empty(1 + max(last, default=-1))
    for part, column in zip(parts, columns, strict=True):
        whole[part.tokens] = column
    return whole


def _chosen(of_all: Sequence[T], indices: Tensor) -> tuple[T, ...]:
    """The values with these indices; empty if there are none at all."""
    return tuple(of_all[index] for index in indices.tolist()) if of_all else ()
