"""What a trial becomes: token tree → `Segment`s → `Trajectory`s, in one `Rollout`; many a `Group`.

Invariant: a sampled token has `mask` True in exactly one segment, and in exactly one of a
rollout's trajectories, however many paths run through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from proxy.records import Ids, Logprobs

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked to do.

    Example: Task(task_id="sum-17", source="arithmetic", data={"prompt": "…", "answer": "42"})
    """

    task_id: str
    data: Mapping[str, Any]
    source: str = "default"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a session's tree between two forks; a path from a root to a leaf is a trajectory.

    Example: a session that forked once after 350 tokens has three segments:
        Segment(parent=-1, ids=[350]), Segment(parent=0, …), Segment(parent=0, …)
    """

    parent: int
    """Index of the segment before this one in the rollout's `segments`; -1 for a root."""
    ids: Ids
    """`[T]`"""
    mask: Mask
    """`[T]`, True where the policy sampled the token and it is to be trained."""
    logprobs: Logprobs
    """`[T]`, as recorded at sampling; 0 where `mask` is False."""
    versions: Ids
    """`[T]`, the weights' version that sampled the token; -1 where `mask` is False."""
    turns: Ids
    """`[T]`, index of the turn that the token is part of (its prompt or its answer)."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One path through the tree as one training sequence; arrays as in `Segment`, all `[T]`.

    Example: ids=[p p p s s p s], mask=[0 0 0 1 1 0 1], turns=[0 0 0 0 0 1 1]
    """

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    versions: Ids
    turns: Ids

    def __len__(self) -> int:
        return len(self.ids)


class RolloutStatus(StrEnum):
    DONE = "done"
    TRUNCATED = "truncated"
    """Ended by a limit (agent's time-out, length): its reward, if a verifier gave one, stands."""
    FAILED = "failed"
    """Our side or the sandbox failed: excluded from training and counted."""
    ABORTED = "aborted"
    """Ended by us: a straggler, a stop rule, Ctrl-C."""


@dataclass(slots=True)
class Rollout:
    """A trial with its reward(s) and its tree.

    Example: Rollout(trial_id="sum-17-9fJq", task=Task(…), status=RolloutStatus.DONE,
                     reward=1.0, segments=(Segment(…),), turn_returns={0: 1.0, 1: 1.0})
    """

    trial_id: str
    task: Task
    status: RolloutStatus
    reward: float | None
    """What trains. None is *no reward*: never 0, never trained."""
    segments: tuple[Segment, ...] = ()
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_returns: Mapping[int, float] = field(default_factory=dict)
    """Turn index → the return credited to it; absent turns have `reward`. (Discounts, turn and
    branch rewards, and the credit policy for side calls end here.)"""
    truncated_turns: tuple[int, ...] = ()
    """Turns whose answer ended with `finish_reason` length."""
    num_turns: int = 0
    forks: Mapping[str, int] = field(default_factory=dict)
    """Fork cause → how often."""
    started_version: int = 0
    """The policy version when the trial was started."""
    error: str | None = None
    """One line, when `status` is not DONE."""
    times_s: Mapping[str, float] = field(default_factory=dict)
    """`total`, `agent`, `verifier`, `generate`, `queue` …"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: str | None = None
    """Folder with the agent's output."""
    seed: int = 0

    @property
    def trainable(self) -> bool:
        return (
            self.status in (RolloutStatus.DONE, RolloutStatus.TRUNCATED)
            and self.reward is not None
            and any(segment.mask.any() for segment in self.segments)
        )

    @property
    def sampled_tokens(self) -> int:
        return int(sum(segment.mask.sum() for segment in self.segments))

    @property
    def oldest_version(self) -> int:
        """The oldest weights that sampled a token of it; `started_version` if none did."""
        oldest = [int(s.versions[s.mask].min()) for s in self.segments if s.mask.any()]
        return min(oldest, default=self.started_version)

    @property
    def newest_version(self) -> int:
        """The newest weights that sampled a token of it; `started_version` if none did."""
        newest = [int(s.versions[s.mask].max()) for s in self.segments if s.mask.any()]
        return max(newest, default=self.started_version)


@dataclass(slots=True)
class Group:
    """The rollouts of one task that share a baseline."""

    group_id: str
    task: Task
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> int:
        """Of the rollouts that can be trained; of all where none can."""
        counted = [r for r in self.rollouts if r.trainable] or self.rollouts
        return min((r.oldest_version for r in counted), default=0)
