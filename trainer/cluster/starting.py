"""Engines that start while the trainer loads its models.

Invariant: after the exit of `StartingEngines`, by success, error or cancellation, every replica has
ended. If a replica cannot start, the run ends as soon as the models are loaded, because their load
cannot be interrupted; later, at once, whatever else the run waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from trainer.cluster.cluster import Cluster, Replica
from trainer.engine import EnginesConfig
from trainer.run.control import RunControl


class StartingEngines:
    """The replicas of a run, from before their start until after their end.

    Example:
    async with StartingEngines(cluster, config.engine, control) as engines:
        ...  # loads the models
        await engines.ready()
    """

    def __init__(self, cluster: Cluster, engine: EnginesConfig, control: RunControl) -> None:
        self._control = control
        self._begins_early = cluster.starts_engines_early
        numbers = () if engine.urls else range(engine.replicas)
        self.replicas: Sequence[Replica] = [cluster.replica(number) for number in numbers]
        self._starting: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._begins_early:
            self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [task for task in (self._failing, self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def ready(self) -> None:
        """Returns when every replica answers.

        Raises:
            EngineError, TrainerError: a replica could not be started.
            StopRequested: the run was asked to stop.
        """
        starting = self._starting or self._begin()
        await self._control.wait_for(_end_of(starting))
        if self._failing is not None:
            self._failing.cancel()
            await asyncio.wait({self._failing})

    def _begin(self) -> asyncio.Task[None]:
        self._starting = asyncio.create_task(self._start())
        self._failing = asyncio.create_task(_failure_of(self._starting))
        self._control.watch(self._failing)
        return self._starting

    async def _start(self) -> None:
        async with asyncio.TaskGroup() as starting:
            for replica in self.replicas:
                starting.create_task(replica.start())


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


async def _failure_of(task: asyncio.Task[None]) -> None:
    """Raises the error of the task; never returns if it has none."""
    await asyncio.shield(task)
    await asyncio.Event().wait()
