"""Two producers whose rollouts begin with recorded turns (`rollout.producer`).

A *branch* is a rollout that replays the first turns of another one, in a fresh workspace, and
samples what follows (docs/rewind.md). Replayed turns are not trained again.

    trees       other rollouts of a group branch from each finished one
    prefixes    groups of tasks that are too hard or too easy begin with turns of a rare outcome

Neither showed a gain over plain groups where it was measured (docs/notes/results.md), so read
them as examples of a producer with its own groups and its own state in a checkpoint:

    rollout:
      group_size: 2
      producer:
        target: examples.branching.producers:trees
        settings: {every: 2, children: 2}
    algorithm:
      advantage: tree       # turn by turn, from the values of the states where rollouts branch

Both are synchronous, and are not for runs with `trainer.policies`.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from agent_loop.producers.groups import GroupRun
from agent_loop.producers.protocol import RunsTrials
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Rollout, Task
from agent_loop.tasks import TaskStream
from proxy.records import Origin

MAX_TASKS = 10_000
"""Tasks that `PrefixSampler` remembers, the latest ones: about 300 bytes each."""
STEP = 0.5
"""Change of the replayed share per group, times the distance of its success rate from a half."""
MEMORY = 0.9
"""Weight of the earlier rollouts of a task in its rate, for each further rollout."""


# Trees: Tree-GRPO, arXiv 2509.21240; RTMC, arXiv 2604.11037.


def trees(
    loop: RunsTrials,
    tasks: TaskStream,
    config: RolloutConfig,
    seed: int,
    *,
    every: int | None = None,
    most_uncertain: int | None = None,
    before_call: str | None = None,
    children: int = 2,
    max_points: int = 8,
) -> SyncProducer:
    """Exactly one of the first three chooses the turns at which rollouts branch.

    Args:
        every: the turns whose index is a multiple of this number.
        most_uncertain: this number of turns, whose sampled tokens have the lowest mean
            log-probability.
        before_call: the turns with a tool call in which this regular expression is found, in the
            first 500 characters of `NAME ARGUMENTS`, such as `^submit `.
        children: number of branches at each chosen turn.
        max_points: maximum number of chosen turns of a rollout; of more, the first ones.
    """
    if sum(each is not None for each in (every, most_uncertain, before_call)) != 1:
        raise ValueError("set one of every, most_uncertain and before_call")

    def points(rollout: Rollout) -> list[int]:
        """The first turn is not among them: a rollout without a branch samples it."""
        if not rollout.trainable:
            return []
        surprise = {t: s for t, s in turn_surprise(rollout).items() if t > 0}
        chosen = sorted(surprise)
        if every is not None:
            chosen = [turn for turn in chosen if turn % every == 0]
        elif before_call is not None:
            calls = {turn: rollout.turn_calls.get(turn, "").split("\n") for turn in chosen}
            chosen = [t for t in chosen if any(re.search(before_call, c) for c in calls[t])]
        else:
            chosen = sorted(surprise, key=lambda turn: -surprise[turn])[:most_uncertain]
        return sorted(chosen[:max_points])

    make = partial(TreeGroup, points=points, children=children)
    return SyncProducer(loop, tasks, config, seed=seed, make_group=make)


@dataclass(slots=True, kw_only=True)
class TreeGroup(GroupRun):
    """The group's rollouts, and after them those that branch from them."""

    points: Callable[[Rollout], Sequence[int]]
    """The turns of a finished rollout that are sampled again, in order."""
    children: int

    async def run(self) -> Group:
        async with asyncio.TaskGroup() as trials:
            started = [trials.create_task(self._with_branches(n)) for n in range(self.size)]
        found = [trial.result() for trial in started]
        rollouts = [trunk for trunk, _ in found] + [b for _, own in found for b in own]
        return self.finished(rollouts)

    async def _with_branches(self, number: int) -> tuple[Rollout, list[Rollout]]:
        trunk = await self.trial((number,))
        places = [
            (number, turn, child) for turn in self.points(trunk) for child in range(self.children)
        ]
        async with asyncio.TaskGroup() as trials:
            started = [
                trials.create_task(self.trial(place, Origin(trunk.trial_id, place[1])))
                for place in places
            ]
        return trunk, [trial.result() for trial in started]


def turn_surprise(rollout: Rollout) -> Mapping[int, float]:
    """Turn that is trained → mean of −log p of its sampled tokens, in nats."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for segment in rollout.segments:
        for turn in set(segment.turns[segment.mask].tolist()):
            own = segment.mask & (segment.turns == turn)
            sums[turn] = sums.get(turn, 0.0) - float(segment.logprobs[own].sum())
            counts[turn] = counts.get(turn, 0) + int(own.sum())
    return {turn: total / counts[turn] for turn, total in sums.items()}


# Prefixes: arXiv 2605.05112.


@dataclass(frozen=True, slots=True)
class Rates:
    """When a task's groups begin with recorded turns.

    Every second group of a task that nearly always fails (rate ≤ `low`) begins with turns of its
    latest success, and of one that nearly always succeeds (rate ≥ `high`) of its latest failure.
    """

    low: float = 0.1
    high: float = 0.9
    success_at: float = 1.0
    """Reward from which on a rollout is a success."""
    min_rollouts: int = 8
    """Number of a task's rollouts from the start before its rate counts."""


def prefixes(
    loop: RunsTrials, tasks: TaskStream, config: RolloutConfig, seed: int, **rates: Any
) -> PrefixProducer:
    """`rates` are the fields of `Rates`."""
    return PrefixProducer(loop, tasks, config, seed, PrefixSampler(Rates(**rates)))


class PrefixProducer(SyncProducer):
    """What is known of the tasks is part of the state in a checkpoint."""

    def __init__(
        self,
        loop: RunsTrials,
        tasks: TaskStream,
        config: RolloutConfig,
        seed: int,
        sampler: PrefixSampler,
    ) -> None:
        make = partial(PrefixGroup, sampler=sampler)
        super().__init__(loop, tasks, config, seed=seed, make_group=make)
        self._sampler = sampler

    def state(self) -> dict[str, Any]:
        return super().state() | {"prefixes": self._sampler.state()}

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        super().start(version, state)
        if state:
            self._sampler.restore(state.get("prefixes", {}))


@dataclass(slots=True, kw_only=True)
class PrefixGroup(GroupRun):
    """A group whose rollouts all begin where the sampler says."""

    sampler: PrefixSampler

    async def run(self) -> Group:
        origin = self.sampler.choose(self.task)
        async with asyncio.TaskGroup() as trials:
            started = [trials.create_task(self.trial((n,), origin)) for n in range(self.size)]
        group = self.finished([trial.result() for trial in started])
        self.sampler.observe(group, origin)
        return group


@dataclass(slots=True)
class KnownTask:
    """What is known of a task from its rollouts."""

    rate: float = 0.0
    """Mean success of its rollouts from the start, in which later ones count more."""
    rollouts: int = 0
    success: str = ""
    """Trial id of its latest success from the start; empty: none."""
    success_turns: int = 0
    """Index of the last turn that it trained."""
    failure: str = ""
    failure_turns: int = 0
    depth: float = 0.5
    """Share of the turns that is replayed."""
    from_start: bool = True
    """Whether its next group is one from the start."""


@dataclass(slots=True)
class PrefixSampler:
    """Chooses where groups begin. Example: sampler.choose(task); …; sampler.observe(group, origin)

    The number of turns that are replayed is steered so that half of such a group succeeds: there
    its rewards differ most. Invariant: rates are those of rollouts from the start alone.
    """

    rates: Rates
    _tasks: OrderedDict[str, KnownTask] = field(default_factory=OrderedDict)

    def choose(self, task: Task) -> Origin | None:
        """Where the next group of the task begins; None: at the start."""
        known = self._known(task)
        trial, turns = self._example(known)
        if known.from_start or not trial or turns < 1:
            return None
        return Origin(trial, min(turns, max(1, round(known.depth * turns))))

    def observe(self, group: Group, origin: Origin | None) -> None:
        """Takes the results of a group that began at `origin`."""
        known = self._known(group.task)
        rewarded = [r for r in group.rollouts if r.trainable]
        if origin is None:
            for rollout in rewarded:
                self._from_start(known, rollout)
            known.from_start = not self._example(known)[0]
            return
        known.from_start = True
        trial, _ = self._example(known)
        if trial == origin.session_id and rewarded:
            rate = sum(map(self._succeeded, rewarded)) / len(rewarded)
            harder = (rate - 0.5) * STEP
            deeper = harder if trial == known.failure else -harder
            known.depth = min(1.0, max(0.0, known.depth + deeper))
        elif trial == origin.session_id:  # its session may have been removed
            known.success, known.failure = "", ""

    def state(self) -> dict[str, Any]:
        """What is known, as values that JSON can hold."""
        return {name: asdict(known) for name, known in self._tasks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with what `state` returned."""
        self._tasks = OrderedDict((name, KnownTask(**known)) for name, known in state.items())

    def _known(self, task: Task) -> KnownTask:
        name = "\n".join((task.source, task.agent, task.task_id))
        known = self._tasks.pop(name, None) or KnownTask()
        self._tasks[name] = known
        if len(self._tasks) > MAX_TASKS:
            self._tasks.popitem(last=False)
        return known

    def _example(self, known: KnownTask) -> tuple[str, int]:
        """The rollout whose turns are replayed, and its last turn; empty: none."""
        if known.rollouts < self.rates.min_rollouts:
            return "", 0
        if known.rate <= self.rates.low:
            return known.success, known.success_turns
        if known.rate >= self.rates.high:
            return known.failure, known.failure_turns
        return "", 0

    def _from_start(self, known: KnownTask, rollout: Rollout) -> None:
        success = self._succeeded(rollout)
        known.rollouts += 1
        # The mean at first, so that the rate does not depend on the first rollout for long.
        weight = max(1 - MEMORY, 1 / known.rollouts)
        known.rate += weight * (success - known.rate)
        last = max(int(s.turns[s.mask].max()) for s in rollout.segments if s.mask.any())
        if success:
            known.success, known.success_turns = rollout.trial_id, last
        else:
            known.failure, known.failure_turns = rollout.trial_id, last

    def _succeeded(self, rollout: Rollout) -> bool:
        return rollout.reward is not None and rollout.reward >= self.rates.success_at
