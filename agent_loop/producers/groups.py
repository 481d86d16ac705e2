"""Runs the rollouts of one task as a group, and decides whether the group is kept for training.

Both producers consist of these parts. Invariant: a rollout's seed is a function of the producer's
seed, the group's number and the rollout's place in the group only, however trials were scheduled.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from agent_loop.errors import AgentLoopError
from agent_loop.producers.protocol import LeftOut, RunsTrials
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import Origin, SessionKind
from proxy.run_files.causes import cause_of

Place = tuple[int, ...]
"""A rollout's number in its group; for a branch followed by the turn and the child's number."""


class ProductionError(AgentLoopError):
    """The groups of a whole batch are not usable, so that the run cannot continue."""


class Verdict(StrEnum):
    """The decision about a finished group."""

    KEPT = "kept"
    FAILED = "failed"
    """Fewer than `min_group_size` rollouts can be trained."""
    UNIFORM = "uniform"
    """All rewards are equal, so that there is nothing to learn."""
    FILTERED = "filtered"
    """The user's own `filter` left it out."""


def rollout_seed(seed: int, group_number: int, *place: int) -> int:
    """The seed of a rollout: 31 bits, which every engine accepts."""
    state = np.random.SeedSequence((seed, group_number, *place)).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF


@dataclass(slots=True)
class GroupRun:
    """`size` rollouts of one task, in the order of their places. A subclass may begin them with
    recorded turns, and add others (`run`).

    Each rollout calls `version` for the policy's version when it starts, which may be later than
    its siblings'. Cancelling `run` ends all rollouts.
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
    """The policy's version when the first of its trials started; None before that."""
    _limits: dict[Place, tuple[float, asyncio.Timeout]] = field(default_factory=dict)
    """Place of a running trial → its start time, and the time limit that its siblings set."""
    _durations_s: list[float] = field(default_factory=list)
    """Of the rollouts that did not fail, without branches: a branch replays its first turns in no
    time, so that it may end long before the rollouts from which others branch."""

    async def run(self) -> Group:
        async with asyncio.TaskGroup() as trials:
            started = [trials.create_task(self.trial((n,))) for n in range(self.size)]
        return self.finished([trial.result() for trial in started])

    def finished(self, rollouts: Sequence[Rollout]) -> Group:
        return Group(f"g{self.number}", self.task, tuple(rollouts))

    async def trial(self, place: Place, origin: Origin | None = None) -> Rollout:
        """Waits for a slot and runs one trial, which begins with the recorded turns of `origin`."""
        seed = rollout_seed(self.seed, self.number, *place)
        async with self.slots:
            version = self.version()
            if self.oldest_start is None:
                self.oldest_start = version
            started = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout_at(self._limit(started)) as limit:
                    self._limits[place] = started, limit
                    rollout = await self.loop.run(
                        self.task, kind=self.kind, seed=seed, version=version, origin=origin
                    )
            except TimeoutError:
                if not limit.expired():
                    raise
                return self._aborted(place, seed, version)
            finally:
                del self._limits[place]
        # A failed trial may end early, so that its time says nothing about the others.
        if rollout.status is not RolloutStatus.FAILED and len(place) == 1:
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

    def _aborted(self, place: Place, seed: int, version: int) -> Rollout:
        limit_s = (self.straggler_factor or 1) * statistics.median(self._durations_s)
        return Rollout(
            f"g{self.number}.{'.'.join(map(str, place))}",
            self.task,
            RolloutStatus.ABORTED,
            None,
            error=f"aborted: {limit_s:.1f} s is {self.straggler_factor} times its group's median",
            started_version=version,
            seed=seed,
        )


def is_large_enough(group: Group, config: RolloutConfig) -> bool:
    """Whether at least `min_group_size` of its rollouts can be trained."""
    trainable = sum(rollout.trainable for rollout in group.rollouts)
    return trainable >= min(config.min_group_size, config.group_size)


def judge(group: Group, config: RolloutConfig) -> Verdict:
    if not is_large_enough(group, config):
        return Verdict.FAILED
    if config.drop_uniform_groups and group.uniform:
        return Verdict.UNIFORM
    return Verdict.KEPT if is_wanted(group, config) else Verdict.FILTERED


def is_wanted(group: Group, config: RolloutConfig) -> bool:
    """Whether the user's own `filter` keeps it; without a filter, all are kept."""
    return config.filter is None or config.filter(group)


class Intake:
    """Decides which finished groups are kept for a batch, and when the run must end.

    Invariant: after a bounded number of groups, one is kept or `ProductionError` is raised. A
    resumed producer continues with the counts that it had (`state`, `restore`).
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._uniform = 0
        """Number of uniform groups, both replaced and kept, for the current batch."""
        self._filtered = 0
        """Number of groups in a row that the user's filter left out."""
        self._failed = Tally()
        """Failed groups since the last group that did not fail."""
        self._hopeless = Tally()
        """Groups from the start without a trainable rollout since the last group that had one. A
        group that begins with recorded turns also fails if their session was removed."""
        self.counts: Counter[str] = Counter()
        """Number of groups by `Verdict` over the run; `no_signal` counts the groups whose rewards
        are all equal, whether they were kept or not."""
        self.left_out: LeftOut = lambda group, reason: None
        """Called with each finished group that will not be trained, and the reason."""

    async def run(self, groups: Sequence[GroupRun]) -> list[Group]:
        """Runs the groups at the same time; returns those that are kept, in the same order.

        Raises:
            ProductionError: as `keeps`.
        """
        async with asyncio.TaskGroup() as running:
            started = [running.create_task(group.run()) for group in groups]
        return [group for ended in started if self.keeps(group := ended.result())]

    def keeps(self, group: Group) -> bool:
        """Whether the group is kept; calls `left_out` if it is not.

        Raises:
            ProductionError: `groups_per_step` groups in a row from the start have no trainable
                rollout, or `max_resamples` times as many in a row have too few, or are left out by
                the user's filter.
        """
        verdict = judge(group, self._config)
        if self._is_kept(group, verdict):
            return True
        self.left_out(group, "no signal" if verdict is Verdict.UNIFORM else verdict.value)
        return False

    def _is_kept(self, group: Group, verdict: Verdict) -> bool:
        config = self._config
        self.counts[verdict.value] += 1
        if verdict is Verdict.FAILED:
            self._fail(group)
            return False
        self.counts["no_signal"] += group.uniform
        self._failed, self._hopeless = Tally(), Tally()
        if verdict is Verdict.FILTERED:
            self._leave_out()
            return False
        if verdict is Verdict.UNIFORM:
            self._uniform += 1
            if self._uniform <= (config.max_resamples - 1) * config.groups_per_step:
                self._filtered = 0
                return False
            if not is_wanted(group, config):
                self._leave_out()
                return False
        self._filtered = 0
        return True

    def batch_is_full(self) -> None:
        """To be called when a batch is complete: the next group counts for the next batch."""
        self._uniform = 0

    def state(self) -> dict[str, Any]:
        """The counts, as values that JSON can hold."""
        return {
            "uniform": self._uniform,
            "filtered": self._filtered,
            "failed": asdict(self._failed),
            "hopeless": asdict(self._hopeless),
            "counts": dict(self.counts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the counts of a `state`; an empty one is the state of a new producer."""
        self._uniform = int(state.get("uniform", 0))
        self._filtered = int(state.get("filtered", 0))
        self._failed = Tally(**state.get("failed", {}))
        self._hopeless = Tally(**state.get("hopeless", {}))
        self.counts.update(state.get("counts", {}))

    def _leave_out(self) -> None:
        self._filtered += 1
        limit = self._config.max_resamples * self._config.groups_per_step
        if self._filtered >= limit and self._config.filter is not None:
            raise ProductionError(
                f"rollout.filter={self._config.filter.target} left out {self._filtered} groups in "
                f"a row, rollout.max_resamples ({self._config.max_resamples}) times "
                f"rollout.groups_per_step ({self._config.groups_per_step}); keep more groups, or "
                "raise rollout.max_resamples"
            )

    def _fail(self, group: Group) -> None:
        config = self._config
        self._failed = self._failed.with_group(group)
        if any(rollout.trainable for rollout in group.rollouts):
            self._hopeless = Tally()
        elif not all(rollout.prefix for rollout in group.rollouts):
            self._hopeless = self._hopeless.with_group(group)
        if self._hopeless.groups >= config.groups_per_step:
            raise ProductionError(self._hopeless.reason())
        if self._failed.groups >= config.max_resamples * config.groups_per_step:
            raise ProductionError(self._failed.reason(config.min_group_size))


@dataclass(frozen=True, slots=True)
class Tally:
    """Consecutive groups that could not be used, and the reasons."""

    groups: int = 0
    trials: int = 0
    unusable: int = 0
    """Number of trials that cannot be trained on."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Cause of unusable trials → number of trials."""
    logs: str | None = None
    """Folder with the logs of the last unusable trial."""

    def with_group(self, group: Group) -> Tally:
        """The tally with one more group."""
        unusable = [rollout for rollout in group.rollouts if not rollout.trainable]
        none = "no reward, or no token that the policy sampled"
        why = (cause_of(r.error) if r.error else none for r in unusable)
        return Tally(
            self.groups + 1,
            self.trials + len(group.rollouts),
            self.unusable + len(unusable),
            dict(Counter(self.reasons) + Counter(why)),
            unusable[-1].logs if unusable else self.logs,
        )

    def reason(self, min_group_size: int = 1) -> str:
        """Why the run ends, with the most frequent reason of the trials."""
        ((reason, count),) = Counter(self.reasons).most_common(1)
        found = f"no usable rollout in {self.trials} trials"
        if self.unusable < self.trials:
            found = (
                f"{self.groups} groups in a row have fewer than {min_group_size} usable rollouts "
                f"(rollout.min_group_size): {self.unusable} of {self.trials} trials are not usable"
            )
        return (
            f"{found}, {count} of them for this reason: {reason}; "
            f"the logs of the last one are in {self.logs}"
        )
