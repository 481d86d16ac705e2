"""Section `rollout.prefix`: groups of too hard or too easy tasks begin with recorded turns.

    the task's rollouts from the start ...    every second group of the task begins with turns of
    nearly always fail (rate ≤ `low`)         its latest success
    nearly always succeed (rate ≥ `high`)     its latest failure

The number of turns that are replayed is steered so that half of such a group succeeds: there its
rewards differ most. Prefix sampling, arXiv 2605.05112. Invariant: replayed turns are not trained,
and rates are those of rollouts from the start alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from agent_loop.records import Group, Rollout, Task
from proxy.records import Origin
from proxy.settings.section import Section

MAX_TASKS = 10_000
"""Tasks that are remembered, the latest ones: about 300 bytes each."""
STEP = 0.5
"""Change of the replayed share per group, times the distance of its success rate from a half."""
MEMORY = 0.9
"""Weight of the earlier rollouts of a task in its rate, for each further rollout."""


class PrefixConfig(Section):
    """Example: PrefixConfig(low=0.1, high=0.9, success_at=1.0)"""

    low: float = Field(0.1, ge=0, lt=0.5)
    """Success rate from which on downwards a task's groups begin with turns of a success."""
    high: float = Field(0.9, gt=0.5, le=1)
    """Success rate from which on upwards a task's groups begin with turns of a failure."""
    success_at: float = 1.0
    """Reward from which on a rollout is a success."""
    min_rollouts: int = Field(8, ge=1)
    """Number of a task's rollouts from the start before its rate counts."""


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


class PrefixSampler:
    """Chooses where groups begin. Example: sampler.choose(task); …; sampler.observe(group)"""

    def __init__(self, config: PrefixConfig) -> None:
        self._config = config
        self._tasks: OrderedDict[str, KnownTask] = OrderedDict()

    def choose(self, task: Task) -> Origin | None:
        """Where the next group of the task begins; None: at the start."""
        known = self._known(task)
        if known.from_start:
            return None
        trial, turns = self._example(known)
        if not trial or turns < 1:
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
        config = self._config
        if known.rollouts < config.min_rollouts:
            return "", 0
        if known.rate <= config.low:
            return known.success, known.success_turns
        if known.rate >= config.high:
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
        return rollout.reward is not None and rollout.reward >= self._config.success_at
