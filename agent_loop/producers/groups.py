"""From one task to a group of rollouts; what both producers are made of.

Invariant: a rollout's seed is a function of the producer's seed, the group's number and the
rollout's place in it alone, however the trials were scheduled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from agent_loop.errors import AgentLoopError
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from proxy.records import SessionKind


class RunsTrials(Protocol):
    """`RemoteAgentLoop`, and whatever else makes rollouts."""

    async def run(
        self, task: Task, *, kind: SessionKind, seed: int = 0, version: int = 0
    ) -> Rollout: ...


class ProductionError(AgentLoopError):
    """No usable rollout came of a whole batch: going on would train on nothing."""


def rollout_seed(seed: int, group_number: int, place: int) -> int:
    """31 bits, as every engine takes them."""
    state = np.random.SeedSequence((seed, group_number, place)).generate_state(1)
    return int(state[0]) & 0x7FFFFFFF


async def run_group(
    loop: RunsTrials,
    task: Task,
    *,
    number: int,
    size: int,
    seed: int,
    version: int,
    slots: asyncio.Semaphore,
    kind: SessionKind = SessionKind.TRAIN,
) -> Group:
    """`size` rollouts of the task, in the order of their places. Cancelling ends all of them."""

    async def one(place: int) -> Rollout:
        async with slots:
            return await loop.run(
                task, kind=kind, seed=rollout_seed(seed, number, place), version=version
            )

    async with asyncio.TaskGroup() as trials:
        started = [trials.create_task(one(place)) for place in range(size)]
    return Group(f"g{number}", task, [trial.result() for trial in started])


def check_usable(groups: Sequence[Group]) -> None:
    """Raises ProductionError when every rollout failed, with the reason that most gave."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.status is not RolloutStatus.FAILED for rollout in rollouts):
        return
    ((reason, count),) = Counter(rollout.error for rollout in rollouts).most_common(1)
    raise ProductionError(
        f"all {len(rollouts)} trials of a batch failed, {count} of them so: {reason}; "
        f"the last one's logs are in {rollouts[-1].logs}"
    )
