"""The synchronous producer: draws the tasks of a batch, runs all trials, and returns the batch.

Invariant: batch k is a function of the tasks, the seed and the policy only: tasks are in the order
of the stream, groups in the order of their tasks, and rollouts in the order of their places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from agent_loop.producers.groups import GroupRun, Intake
from agent_loop.producers.protocol import RunsTrials
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Group, Task
from agent_loop.tasks import TaskStream


class SyncProducer:
    """Example: groups = await SyncProducer(loop, tasks, config, seed=0).next_batch(version=0)"""

    def __init__(
        self,
        loop: RunsTrials,
        tasks: TaskStream,
        config: RolloutConfig,
        *,
        seed: int,
        make_group: Callable[..., GroupRun] = GroupRun,
    ) -> None:
        """`make_group` is called with the arguments of `GroupRun`; it may return a subclass."""
        self._loop = loop
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._slots = asyncio.Semaphore(config.concurrency)
        self.intake = Intake(config)
        self._make_group = make_group
        self.counts = self.intake.counts
        """Number of groups by `Verdict` over the run, and `no_signal`, as in `Intake`."""

    async def next_batch(self, version: int) -> list[Group]:
        """The next `groups_per_step` usable groups, sampled by the weights of `version`.

        Failed rollouts stay in their groups and are not trainable; the consumer counts them.

        Raises:
            ProductionError: as `Intake.keeps`.
        """
        kept: list[Group] = []
        while (missing := self._config.groups_per_step - len(kept)) > 0:
            kept += await self.intake.run([self._next_group(version) for _ in range(missing)])
        self.intake.batch_is_full()
        return kept

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint that contains every batch so far."""
        return {"cursor": self._tasks.state(), "intake": self.intake.state()}

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """Starts production. `state` comes from the checkpoint that the trainer resumes from."""
        if state:
            self._tasks.restore(state["cursor"])
            self.intake.restore(state.get("intake", {}))

    def set_version(self, version: int) -> None:
        """Does nothing: nothing is sampled between batches."""

    def pause(self) -> None:
        """Does nothing: nothing is sampled between batches."""

    def resume(self) -> None:
        """Does nothing, as `pause`."""

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """Does nothing: no batch is kept until a checkpoint contains it."""

    async def close(self) -> None:
        """Does nothing: nothing runs between batches."""

    def draw(self) -> Task:
        """The task of the next group. A subclass may choose it; the position in the stream is part
        of the producer's state."""
        return self._tasks.draw()

    def _next_group(self, version: int) -> GroupRun:
        number = self._tasks.cursor.draws
        return self._make_group(
            self._loop,
            self.draw(),
            number=number,
            size=self._config.group_size,
            seed=self._seed,
            version=lambda: version,
            slots=self._slots,
            straggler_factor=self._config.straggler_factor,
        )
