"""The synchronous producer: a batch is drawn, run to its end, and handed over whole.

Invariant: batch k is a function of the tasks, the seed and the policy alone: tasks in the order
of the stream, groups in the order of their tasks, rollouts in the order of their places.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.producers.groups import RunsTrials, check_usable, run_group
from agent_loop.records import Group
from agent_loop.tasks import TaskStream


class BatchSettings(BaseModel):
    """Example: BatchSettings(groups=8, group_size=4, max_concurrent=16)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: int = Field(8, ge=1)
    """Tasks in a batch."""
    group_size: int = Field(8, ge=1)
    """Rollouts of each."""
    max_concurrent: int = Field(32, ge=1)
    """Trials at a time."""


class SyncProducer:
    def __init__(
        self, loop: RunsTrials, tasks: TaskStream, settings: BatchSettings, *, seed: int
    ) -> None:
        self._loop = loop
        self._tasks = tasks
        self._settings = settings
        self._seed = seed
        self._slots = asyncio.Semaphore(settings.max_concurrent)

    async def next_batch(self, version: int) -> list[Group]:
        """The next `groups` tasks' groups, sampled by the weights of `version`.

        Failed rollouts are in their groups, not trainable; the consumer counts them.

        Raises:
            ProductionError: every trial failed.
        """
        first = self._tasks.cursor.draws
        async with asyncio.TaskGroup() as running:
            started = [
                running.create_task(
                    run_group(
                        self._loop,
                        self._tasks.draw(),
                        number=first + i,
                        size=self._settings.group_size,
                        seed=self._seed,
                        version=version,
                        slots=self._slots,
                    )
                )
                for i in range(self._settings.groups)
            ]
        groups = [group.result() for group in started]
        check_usable(groups)
        return groups
