"""The data of one training step: the trained tokens of a batch of groups, as flat columns.

Invariant: a token that is to be trained has exactly one entry in the columns, even if several paths
share it, and no other token has an entry. Every loss, weight and statistic is a function of these
columns; no masks are needed. Only what rewards are compared with also counts turns that are too old
to be trained (`stale`).

Shapes: `G` groups, `R` rollouts, `S` sequences (one per trajectory), `N` trained tokens.

A batch is divided over the ranks. Invariant: every sequence of a batch that is divided over the
ranks, with all of its tokens, is in exactly one part. A part is a batch of its own, whose sequences
and tokens have the same order as in the whole batch, and it holds nothing of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agent_loop import kept_tokens
from agent_loop.kept_tokens import KeptTokens
from agent_loop.records import UNSAMPLED, Group, Rollout, Segment, Trajectory
from agent_loop.trajectory import flatten
from proxy.errors import ImageError
from proxy.records import Ids, ImageSpan
from proxy.records.expert_rows import Routing
from proxy.records.images import check_images
from trainer.errors import TrainingError

Column = npt.NDArray[Any]
Source = Literal["recorded", "rendered"]
"""Where the tokens of a text to imitate come from: an engine recorded their ids, or the model's own
renderer made them of the recorded text."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that are laid out together in a micro-batch.

    Example: Unit(sequences=(0, 1), tokens=5)  # [5 6 7] and [5 6 8 9], which share a prefix
    """

    sequences: tuple[int, ...]
    """Indices of the sequences in the batch."""
    tokens: int
    """Number of their input tokens; a shared prefix counts once."""


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """Part of a tree of sequences whose tokens stand in depth-first order.

    Example: PiecePlan(tree=0, start=8192, stop=16384)
    """

    tree: int
    """Number of the tree; the ranks have one each."""
    start: int
    """Its first token, as an index in the tree's tokens."""
    stop: int
    """The token after its last one."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What a micro-batch will hold. Example: RowPlan((Unit((0, 1), 5),), share=0.5)"""

    units: tuple[Unit, ...]
    """Of a piece: the sequences of which it holds the first token that is not shared with an
    earlier sequence of the tree."""
    share: float
    """The share of its input tokens among those of all micro-batches that were planned with it,
    also those of other ranks."""
    piece: PiecePlan | None = None
    """Of which tokens of a tree it computes the pass; None: it holds whole trees, or nothing."""
    reads_only: bool = False
    """Whether the pass computes only what later ones attend to; it trains no token."""


@dataclass(frozen=True, slots=True)
class StaleTurns:
    """Turns with tokens that are too old to be trained: `K` of them, with what their tokens would
    have in the columns of the batch. Example: StaleTurns([1], [0], [12], [1.0], [1.0])"""

    rollout: Tensor
    """`[K]` int64, index of the turn's rollout."""
    turns: Tensor
    """`[K]` int64, index of the turn within its session."""
    tokens: Tensor
    """`[K]` int64, number of its tokens that are too old."""
    returns: Tensor
    """`[K]` float32, the return that the turn is credited with."""
    shares: Tensor
    """`[K]` float32, the share of the trial's reward in that return."""


@dataclass(slots=True)
class Batch:
    """The trained tokens of `R` rollouts.

    Example: two rollouts of one task, the second with one token fewer:
        sequences        = ([5 6 7 8], [5 6 9])       # p p s s | p p s
        sequence_rollout = [0 1]     group = [0 0]
        rewards = [1.0 0.0]   trial_rewards = [1.0 0.0]
        sequence         = [0 0 1]   position = [2 3 2]   ids = [7 8 9]   turns = [0 0 0]
        logprobs         = [-0.1 -2.3 -0.7]   versions = [4 4 4]
        returns          = [1.0 1.0 0.0]   shares = [1.0 1.0 1.0]
    """

    trial_ids: tuple[str, ...]
    """`[R]`, ids of the trials, which name the rollouts in error messages."""
    group: Tensor
    """`[R]` int64, index of the rollouts that share a baseline: a group, or the rollouts of a group
    that began with the same recorded turns."""
    rewards: Tensor
    """`[R]` float32, reward of each rollout."""
    trial_rewards: Tensor
    """`[R]` float32, the part of the rewards that their turns share: all but what belongs to single
    turns (`Rollout.reward_of_turns`)."""
    sequences: tuple[Ids, ...]
    """`[S]` arrays of token ids: the whole sequences, both prompt and sampled tokens. Those of
    images are below 0 (`proxy.records.images`)."""
    sequence_rollout: Tensor
    """`[S]` int64, index of the sequence's rollout. A rollout without a sequence is not trained;
    others are compared with it."""

    sequence: Tensor
    """`[N]` int64, index of the token's sequence; ascending, so that a sequence is a slice."""
    position: Tensor
    """`[N]` int64, the token's position in its sequence; at least 1."""
    ids: Tensor
    """`[N]` int64, token id."""
    turns: Tensor
    """`[N]` int64, index of the token's turn within its session."""
    logprobs: Tensor
    """`[N]` float32, log-probability under the behaviour policy, as recorded at sampling."""
    versions: Tensor
    """`[N]` int64, version of the weights that sampled the token."""
    returns: Tensor
    """`[N]` float32, the return that the token's turn is credited with; by default the reward."""
    shares: Tensor
    """`[N]` float32, the share of `trial_rewards` in that return: 1 without a discount."""
    kept: Tensor | None = None
    """`[N, K]` int64, the tokens from which the token was sampled, itself among them; the rest of a
    row repeats it. None: from the whole vocabulary, as a row that is -1 throughout."""
    stale: StaleTurns | None = None
    """The turns with tokens that are too old; None: there are none, or the batch is a part."""
    prefixes: tuple[str, ...] = ()
    """`[R]`, the recorded turns with which each rollout began, as `Rollout.prefix`; empty: no
    rollout did."""
    routing: tuple[Routing | None, ...] = ()
    """`[S]`, the experts that the engine's router chose for the tokens of each sequence; empty: no
    sequence has any."""
    images: tuple[tuple[ImageSpan, ...], ...] = ()
    """`[S]`, the images in each sequence, in order; empty: no sequence has any."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """The bytes of the images by their sha256, as the agents sent them."""
    sources: tuple[Source, ...] = ()
    """`[R]`, for text to imitate: where the tokens of each rollout come from. Empty: the policy of
    this run sampled all of them."""
    micro_batches: tuple[RowPlan, ...] = ()
    """The plan of each micro-batch, if the batch is one rank's part; empty: it is not divided
    yet."""

    prox_logprobs: Tensor | None = None
    """`[N]` float32, log-probability under the policy at the start of the update; None until it is
    computed, as in the following columns."""
    entropies: Tensor | None = None
    """`[N]` float32, entropy in nats of the distribution of the token under the policy at the start
    of the update, at the rollout's temperature."""
    ref_logprobs: Tensor | None = None
    """`[N]` float32, log-probability under the frozen reference."""
    teacher_logprobs: Tensor | None = None
    """`[N]` float32, log-probability under the teacher of a distillation."""
    values: Tensor | None = None
    """`[N]` float32, the critic's value of the state in which the token was sampled."""
    advantages: Tensor | None = None
    """`[N]` float32, advantage of the token."""
    value_targets: Tensor | None = None
    """`[N]` float32, the values that the critic learns to predict."""

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts that are trained or compared with those, `R`."""
        return len(self.trial_ids)

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens, `N`."""
        return len(self.ids)

    @property
    def input_tokens(self) -> int:
        """Number of tokens of all sequences, with shared prefixes counted for each sequence."""
        return sum(len(ids) for ids in self.sequences)

    @property
    def rollout(self) -> Tensor:
        """`[N]` int64, index of the token's rollout."""
        return self.sequence_rollout[self.sequence]

    @property
    def rollout_tokens(self) -> Tensor:
        """`[R]` float32, number of trained tokens of each rollout."""
        return torch.bincount(self.rollout, minlength=self.num_rollouts).float()

    @property
    def sampled_tokens(self) -> Tensor:
        """`[R]` float32, number of tokens of each rollout that are trained or too old for it."""
        if self.stale is None:
            return self.rollout_tokens
        return self.rollout_tokens.index_add(0, self.stale.rollout, self.stale.tokens.float())

    def images_of(self, sequence: int) -> tuple[ImageSpan, ...]:
        """The images in the sequence with this index."""
        return self.images[sequence] if self.images else ()

    def name(self, token: int) -> str:
        """The trial and the turn of the trained token with index `token`, for error messages."""
        trial = self.trial_ids[int(self.rollout[token])]
        return f"rollout {trial}, turn {int(self.turns[token])}"


def trained_batch(groups: Sequence[Group]) -> Batch:
    """The batch of the groups' trainable rollouts, in which every rollout trains exactly its
    sampled tokens.

    Raises:
        TrainingError: a rollout would train other tokens, or there is no token to train.
    """
    sampled = {
        rollout.trial_id: rollout.sampled_tokens
        for group in groups
        for rollout in group.rollouts
        if rollout.trainable
    }
    if not sampled:
        ends = sorted({r.error or r.status.value for g in groups for r in g.rollouts})
        raise TrainingError(f"no rollout of the batch can be trained: {'; '.join(ends)[:300]}")
    trials = Counter(r.trial_id for group in groups for r in group.rollouts if r.trainable)
    trial, times = trials.most_common(1)[0]
    if times > 1:
        raise TrainingError(f"rollout {trial} stands {times} times in the batch, not once")
    batch = build_batch(groups)
    trained = dict(zip(batch.trial_ids, batch.rollout_tokens.tolist(), strict=True))
    for trial, count in sampled.items():
        if trained.get(trial, 0) != count:
            raise TrainingError(
                f"rollout {trial}: {count} tokens were sampled, but the batch would train "
                f"{trained.get(trial, 0):.0f}"
            )
    unsampled = torch.nonzero(batch.versions == UNSAMPLED)
    if len(unsampled):
        raise TrainingError(
            f"{batch.name(int(unsampled[0]))}: {len(unsampled)} tokens would be trained that no "
            "version of the weights has sampled"
        )
    return batch


def build_batch(groups: Sequence[Group]) -> Batch:
    """The trained tokens of all rollouts of `groups` that are trainable or compared with them;
    other rollouts are left out.

    Raises ValueError for a rollout whose records are inconsistent (a log-probability that is not
    finite, arrays of different lengths, a trained token without a token before it).
    """
    rollouts = [(g, r) for g, group in enumerate(groups) for r in group.rollouts if r.compared]
    for _, rollout in rollouts:
        for index, segment in enumerate(rollout.segments):
            _check(rollout, index, segment)
    return _merged(rollouts)


def imitation_batch(rollouts: Sequence[Rollout], sources: Sequence[Source]) -> Batch:
    """The trained tokens of recorded trials to imitate, whose prefixes are shared across trials.
    `logprobs` are NaN, so that only a loss of imitation can be computed."""
    batch = _merged([(0, rollout) for rollout in rollouts])
    batch.logprobs = torch.full_like(batch.logprobs, torch.nan)
    batch.routing = ()  # of another model
    batch.sources = tuple(sources)
    return batch


def _merged(rollouts: Sequence[tuple[int, Rollout]]) -> Batch:
    """The batch of these rollouts, each with the index of its group."""
    sequences: list[Ids] = []
    routing: list[Routing | None] = []
    images: list[tuple[ImageSpan, ...]] = []
    sequence_rollout: list[int] = []
    columns: list[tuple[Column, ...]] = []
    kept: list[tuple[int, KeptTokens | None]] = []
    for index, (_, rollout) in enumerate(rollouts):
        for path, fields in _sequences(rollout):
            columns.append((np.full(len(fields[0]), len(sequences)), *fields))
            sequences.append(path.ids)
            routing.append(path.routing)
            images.append(path.images)
            kept.append((len(fields[0]), None if path.kept is None else path.kept[path.mask]))
            sequence_rollout.append(index)
    merged = [np.concatenate(column) for column in zip(*columns, strict=True)] or [np.zeros(0)] * 8
    sequence, position, token, turn, version, logprob, returns, shares = merged
    return Batch(
        trial_ids=tuple(rollout.trial_id for _, rollout in rollouts),
        prefixes=tuple(rollout.prefix for _, rollout in rollouts),
        group=_shared_baselines(rollouts),
        rewards=_float([rollout.reward for _, rollout in rollouts]),
        trial_rewards=_float([(r.reward or 0.0) - r.reward_of_turns for _, r in rollouts]),
        sequences=tuple(sequences),
        routing=tuple(routing) if any(each is not None for each in routing) else (),
        images=tuple(images) if any(images) else (),
        pictures={name: data for _, r in rollouts for name, data in r.pictures.items()},
        sequence_rollout=_int(sequence_rollout),
        sequence=_int(sequence),
        position=_int(position),
        ids=_int(token),
        turns=_int(turn),
        versions=_int(version),
        logprobs=_float(logprob),
        returns=_float(returns),
        shares=_float(shares),
        kept=_kept(kept_tokens.joined(kept), token),
        stale=_stale_turns([rollout for _, rollout in rollouts]),
    )


def _kept(rows: KeptTokens | None, ids: Column) -> Tensor | None:
    """The column `Batch.kept`: a row that has tokens is filled with the sampled one."""
    if rows is None:
        return None
    fills = (rows == kept_tokens.NONE) & (rows != kept_tokens.NONE).any(1, keepdims=True)
    return _int(np.where(fills, ids[:, None], rows))


def _stale_turns(rollouts: Sequence[Rollout]) -> StaleTurns | None:
    rows = [
        (
            index,
            turn,
            count,
            rollout.turn_returns.get(turn, rollout.reward),
            rollout.turn_shares.get(turn, 1.0),
        )
        for index, rollout in enumerate(rollouts)
        for turn, count in sorted(rollout.stale_turns.items())
    ]
    if not rows:
        return None
    rollout, turns, tokens, returns, shares = zip(*rows, strict=True)
    return StaleTurns(_int(rollout), _int(turns), _int(tokens), _float(returns), _float(shares))


def _sequences(rollout: Rollout) -> Iterator[tuple[Trajectory, tuple[Column, ...]]]:
    """The rollout's paths from a root to a leaf, each with the columns of its trained tokens."""
    for path in flatten(rollout.segments):
        mask = path.mask
        if not mask.any():
            continue
        if mask[0]:
            raise ValueError(
                f"rollout {rollout.trial_id}: the first token of a path is marked as sampled, "
                "but a sampled token needs a prompt before it"
            )
        turns = path.turns[mask]
        returns = _of_turns(turns, rollout.turn_returns, rollout.reward)
        shares = _of_turns(turns, rollout.turn_shares, 1.0)
        position = np.flatnonzero(mask)
        columns = (position, path.ids[mask], turns, path.versions[mask], path.logprobs[mask])
        yield path, (*columns, returns, shares)


def _of_turns(turns: Column, values: Mapping[int, float], default: float | None) -> Column:
    """The value of each token's turn; `turns` has the turn of each token."""
    starts = np.flatnonzero(np.diff(turns, prepend=turns[0] - 1))
    each = [values.get(turn, default) for turn in turns[starts].tolist()]
    return np.repeat(np.array(each), np.diff(starts, append=len(turns)))


def _check(rollout: Rollout, index: int, segment: Segment) -> None:
    where = f"rollout {rollout.trial_id}, segment {index}"
    lengths = {
        name: len(getattr(segment, name))
        for name in ("ids", "mask", "logprobs", "versions", "turns")
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: lengths differ: {lengths}")
    if segment.parent >= index:
        raise ValueError(f"{where}: parent {segment.parent} does not come before it")
    try:
        check_images(segment.ids, segment.images)
    except ImageError as error:
        raise ValueError(f"{where}: {error}") from error
    if (segment.mask & (segment.ids < 0)).any():
        raise ValueError(f"{where}: tokens of an image are marked as sampled")
    bad = np.flatnonzero(segment.mask & ~np.isfinite(segment.logprobs))
    if len(bad):
        turn = int(segment.turns[bad[0]])
        value = segment.logprobs[bad[0]]
        raise ValueError(f"{where}, turn {turn}: log-probability {value} is not finite")


def _shared_baselines(rollouts: Sequence[tuple[int, Rollout]]) -> Tensor:
    """`[R]`: an index, without gaps, for each group and each prefix of its rollouts."""
    found: dict[tuple[int, str], int] = {}
    return _int([found.setdefault((g, r.prefix), len(found)) for g, r in rollouts])


def _int(values: npt.ArrayLike) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64))


def _float(values: object) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.float32))


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
            stale=None,
            group=batch.group[rollouts],
            rewards=batch.rewards[rollouts],
            trial_rewards=batch.trial_rewards[rollouts],
            sequences=_chosen(batch.sequences, chosen),
            routing=_chosen(batch.routing, chosen),
            images=(images := _chosen(batch.images, chosen)),
            pictures=_pictures(batch, images),
            sequence_rollout=owners,
            sequence=torch.searchsorted(chosen, batch.sequence[tokens]),
            position=batch.position[tokens],
            ids=batch.ids[tokens],
            turns=batch.turns[tokens],
            logprobs=batch.logprobs[tokens],
            versions=batch.versions[tokens],
            returns=batch.returns[tokens],
            shares=batch.shares[tokens],
            kept=of_token(batch.kept),
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


def _pictures(batch: Batch, images: Iterable[Iterable[ImageSpan]]) -> dict[str, bytes]:
    """The bytes of these images, as far as the batch has them."""
    named = {image.sha256 for own in images for image in own}
    return {sha256: batch.pictures[sha256] for sha256 in named & batch.pictures.keys()}


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
