"""From one task to a group of rollouts, and whether it is worth training on.

Both producers are made of these. Invariant: a rollout's seed is a function of the producer's
seed, the group's number and the rollout's place in it alone, however the trials were scheduled.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agent_loop.errors import AgentLoopError
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import SessionKind


class BatchSettings(BaseModel):
    """Example: BatchSettings(groups=8, group_size=4, max_concurrent=16)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: int = Field(8, ge=1)
    """Groups, each of one task, in a batch."""
    group_size: int = Field(8, ge=1)
    """Rollouts of each."""
    max_concurrent: int = Field(32, ge=1)
    """Trials at a time."""
    min_group_size: int = Field(1, ge=1)
    """A group with fewer trainable rollouts is replaced by another task's."""
    drop_uniform: bool = False
    """Groups whose rewards are all equal are replaced by others (DAPO's dynamic sampling,
    arXiv 2503.14476)."""
    max_resamples: int = Field(4, ge=1)
    """With `drop_uniform`: when this many times `groups` were run for one batch, it is filled up
    with uniform ones. When this many times `groups` in a row have fewer trainable rollouts than
    `min_group_size`, the run ends."""
    straggler_factor: float | None = Field(None, gt=1)
    """A trial is aborted once it has run this many times as long as the median of its group's
    finished trials, half of the group being finished. The group goes on without it."""


class RunsTrials(Protocol):
    """`RemoteAgentLoop`, and whatever else makes rollouts."""

    async def run(
        self, task: Task, *, kind: SessionKind, seed: int = 0, version: int = 0
    ) -> Rollout: ...


class ProductionError(AgentLoopError):
    """Nothing usable came of a whole batch: going on would train on nothing."""


class Verdict(StrEnum):
    KEPT = "kept"
    FAILED = "failed"
    """Fewer than `min_group_size` rollouts can be trained."""
    UNIFORM = "uniform"
    """All rewards are equal: no signal."""


def rollout_seed(seed: int, group_number: int, place: int) -> int:
    """31 bits, as every engine takes them."""
    state = np.random.SeedSequence((seed, group_number, place)).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF


@dataclass(slots=True)
class GroupRun:
    """`size` rollouts of one task, in the order of their places.

    Each asks `version` for the policy's version when it starts, which may be later than its
    siblings'. Cancelling `run` ends all of them.
    """

    loop: RunsTrials
    task: Task
    number: int
    size: int
    seed: int
    version: Callable[[], int]
    slots: asyncio.Semaphore
    kind: SessionKind = SessionKind.TRAIN
    straggler_factor: float | None = None
    oldest_start: int | None = None
    """Version at which the first of its trials started."""
    _limits: dict[int, tuple[float, asyncio.Timeout]] = field(default_factory=dict)
    """Of the running trials: when they started, and the time limit that siblings set."""
    _durations_s: list[float] = field(default_factory=list)

    async def run(self) -> Group:
        async with asyncio.TaskGroup() as trials:
            started = [trials.create_task(self._one(place)) for place in range(self.size)]
        return Group(f"g{self.number}", self.task, [trial.result() for trial in started])

    async def _one(self, place: int) -> Rollout:
        seed = rollout_seed(self.seed, self.number, place)
        async with self.slots:
            version = self.version()
            if self.oldest_start is None:
                self.oldest_start = version
            started = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(self._limit(started)) as limit:
                    self._limits[place] = started, limit
                    rollout = await self.loop.run(
                        self.task, kind=self.kind, seed=seed, version=version
                    )
            except TimeoutError:
                if not limit.expired():
                    raise
                return self._aborted(place, seed, version)
            finally:
                del self._limits[place]
        if rollout.status is not RolloutStatus.FAILED:  # a trial that fails at once is not fast
            self._finished(asyncio.get_running_loop().time() - started)
        return rollout

    def _finished(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        for started, limit in self._limits.values():
            if not limit.expired():
                limit.reschedule(self._limit(started))

    def _limit(self, started: float) -> float | None:
        if self.straggler_factor is None or 2 * len(self._durations_s) < self.size:
            return None
        return started + self.straggler_factor * statistics.median(self._durations_s)

    def _aborted(self, place: int, seed: int, version: int) -> Rollout:
        limit_s = (self.straggler_factor or 1) * statistics.median(self._durations_s)
        return Rollout(
            f"g{self.number}.{place}",
            self.task,
            RolloutStatus.ABORTED,
            None,
            error=f"aborted: {limit_s:.1f} s is {self.straggler_factor} times its group's median",
            started_version=version,
            seed=seed,
        )


def judge(group: Group, settings: BatchSettings) -> Verdict:
    trainable = [rollout for rollout in group.rollouts if rollout.trainable]
    if len(trainable) < min(settings.min_group_size, settings.group_size):
        return Verdict.FAILED
    if settings.drop_uniform and len({rollout.reward for rollout in trainable}) == 1:
        return Verdict.UNIFORM
    return Verdict.KEPT


class Intake:
    """Which of the groups that come in are kept for a batch, and when it is no use to go on.

    Invariant: of finitely many groups in a row one is kept, or `ProductionError` is raised.
    """

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._uniform = 0
        """Of the batch that is being filled."""
        self._failed: list[Group] = []
        """Since the last group that did not fail."""
        self._hopeless = 0
        """Groups without a trainable rollout, since the last that had one."""
        self.counts: Counter[str] = Counter()
        """Groups by `Verdict`, over the run."""

    def keeps(self, group: Group) -> bool:
        """
        Raises:
            ProductionError: as many groups as a batch has gave no trainable rollout, in a row, or
                `max_resamples` times as many too few.
        """
        settings, verdict = self._settings, judge(group, self._settings)
        self.counts[verdict.value] += 1
        if verdict is Verdict.FAILED:
            self._fail(group)
            return False
        self._failed, self._hopeless = [], 0
        if verdict is Verdict.KEPT:
            return True
        self._uniform += 1
        return self._uniform > (settings.max_resamples - 1) * settings.groups

    def batch_is_full(self) -> None:
        """Groups are kept for the next batch from now on."""
        self._uniform = 0

    def _fail(self, group: Group) -> None:
        settings = self._settings
        self._failed.append(group)
        trainable = any(rollout.trainable for rollout in group.rollouts)
        self._hopeless = 0 if trainable else self._hopeless + 1
        if self._hopeless >= settings.groups:
            raise production_error(self._failed[-self._hopeless :])
        if len(self._failed) >= settings.max_resamples * settings.groups:
            raise production_error(self._failed, settings.min_group_size)


def without_stale_tokens(group: Group, oldest_allowed: int) -> Group:
    """The group with tokens of versions before `oldest_allowed` as context, not trained."""

    def fresh(rollout: Rollout) -> Rollout:
        segments = tuple(
            replace(
                segment,
                mask=(keep := segment.mask & (segment.versions >= oldest_allowed)),
                logprobs=np.where(keep, segment.logprobs, np.float32(0)),
                versions=np.where(keep, segment.versions, np.int32(-1)),
            )
            for segment in rollout.segments
        )
        return replace(rollout, segments=segments)

    return replace(group, rollouts=[fresh(rollout) for rollout in group.rollouts])


def production_error(groups: Sequence[Group], min_group_size: int = 1) -> ProductionError:
    """Why a run stops whose trials fail: the reason that most of them gave."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    unusable = [rollout for rollout in rollouts if not rollout.trainable]
    reasons = Counter(
        rollout.error or "no reward, or no token that the policy sampled" for rollout in unusable
    )
    ((reason, count),) = reasons.most_common(1)
    found = f"no usable rollout in {len(rollouts)} trials"
    if len(unusable) < len(rollouts):
        found = (
            f"{len(groups)} groups in a row have fewer than {min_group_size} usable rollouts "
            f"(rollout.min_group_size): {len(unusable)} of {len(rollouts)} trials are not usable"
        )
    return ProductionError(
        f"{found}, {count} of them for this reason: {reason}; "
        f"the last one's logs are in {unusable[-1].logs}"
    )
