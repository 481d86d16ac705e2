"""The synchronous producer: a batch is drawn, run to its end, and handed over whole.

Invariant: batch k is a function of the tasks, the seed and the policy alone: tasks in the order
of the stream, groups in the order of their tasks, rollouts in the order of their places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agent_loop.producers.groups import (
    BatchSettings,
    GroupRun,
    Intake,
    RunsTrials,
)
from agent_loop.records import Group
from agent_loop.tasks import TaskStream


class SyncProducer:
    def __init__(
        self, loop: RunsTrials, tasks: TaskStream, settings: BatchSettings, *, seed: int
    ) -> None:
        self._loop = loop
        self._tasks = tasks
        self._settings = settings
        self._seed = seed
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._intake = Intake(settings)
        self.counts = self._intake.counts
        """Groups by `Verdict`, over the run."""

    async def next_batch(self, version: int) -> list[Group]:
        """The next `groups` usable groups, sampled by the weights of `version`.

        Failed rollouts are in their groups, not trainable; the consumer counts them.

        Raises:
            ProductionError: as `Intake.keeps`.
        """
        kept: list[Group] = []
        while (missing := self._settings.groups - len(kept)) > 0:
            kept += filter(self._intake.keeps, await self._run(missing, version))
        self._intake.batch_is_full()
        return kept

    def state(self) -> dict[str, Any]:
        """For the checkpoint that contains every batch so far."""
        return {"cursor": dict(self._tasks.cursor.taken)}

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """`state` is that of the checkpoint the trainer resumes from."""
        if state:
            self._tasks.restore(state["cursor"])

    def set_version(self, version: int) -> None:
        """Nothing is sampled between batches."""

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept for a checkpoint that was not made."""

    async def close(self) -> None:
        """Nothing runs between batches."""

    async def _run(self, count: int, version: int) -> list[Group]:
        async with asyncio.TaskGroup() as running:
            started = [running.create_task(self._next_group(version).run()) for _ in range(count)]
        return [group.result() for group in started]

    def _next_group(self, version: int) -> GroupRun:
        number = self._tasks.cursor.draws
        return GroupRun(
            self._loop,
            self._tasks.draw(),
            number=number,
            size=self._settings.group_size,
            seed=self._seed,
            version=lambda: version,
            slots=self._slots,
            straggler_factor=self._settings.straggler_factor,
        )
