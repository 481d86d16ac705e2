"""The asynchronous producer: trials never stop while the trainer trains, within a staleness bound.

Invariant: staleness (the trainer's version minus the oldest version that sampled a trained token)
is at most `max_staleness` in every batch that is handed over. It is enforced twice:

    at admission     no more groups are alive than the next `max_staleness` + 1 batches need
    at consumption   what is older all the same (a straggler) is dropped or masked

With `max_staleness` 0 nothing is started while the trainer trains, and the batches are those of
the synchronous producer, seed for seed.

    draw ──▶ running ──▶ judged ──▶ ready ──▶ taken (a batch, lowest group numbers first)
               │            └─▶ dropped: failed, uniform
               └─▶ cancelled: too old ──▶ tail (run again, without over-sampling) or dropped
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import Field

from agent_loop.producers.buffer import Drawn, ReplayBuffer
from agent_loop.producers.groups import (
    BatchSettings,
    GroupRun,
    Intake,
    ProductionError,
    RunsTrials,
    Verdict,
    judge,
    without_stale_tokens,
)
from agent_loop.records import Group
from agent_loop.tasks import TaskStream


class AsyncSettings(BatchSettings):
    """Example: AsyncSettings(groups=8, group_size=4, max_staleness=2, over_sample=0.25)"""

    max_staleness: int = Field(1, ge=0)
    """Updates that a batch's oldest token may be behind the weights that train on it."""
    stale: Literal["drop", "mask"] = "drop"
    """What happens to an older group: the whole is dropped (and cancelled if it still runs), or
    only its old tokens are not trained."""
    over_sample: float = Field(0.0, ge=0)
    """Further groups alive, as a share of `groups`, while the trainer waits: the batch is the
    first `groups` that finish."""
    partial_rollout: bool = True
    """Trials in flight go on across a weight update, each token with its version. False: they are
    cancelled at the update."""
    tail_groups: int = Field(0, ge=0)
    """Tasks of cancelled groups are collected, and run again without over-sampling once there are
    this many: without it, tasks that take long are never learnt. 0: they are dropped."""


@dataclass(slots=True)
class _Running:
    drawn: Drawn
    run: GroupRun
    task: asyncio.Task[None]
    tail: bool


class AsyncProducer:
    """Example:
    async with AsyncProducer(loop, tasks, settings, seed=0, buffer=buffer) as producer:
        producer.start(version=0)
        groups = await producer.next_batch(version=0)
        ...                                     # train, update the engine's weights
        producer.set_version(1)
    """

    def __init__(
        self,
        loop: RunsTrials,
        tasks: TaskStream,
        settings: AsyncSettings,
        *,
        seed: int,
        buffer: ReplayBuffer,
    ) -> None:
        self._loop = loop
        self._tasks = tasks
        self._settings = settings
        self._seed = seed
        self._buffer = buffer
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self.version = 0
        """Of the weights that the engine samples with."""
        self._batches = 0
        self._training = False
        self._again: deque[tuple[Drawn, bool]] = deque()
        """To be run before anything is drawn; True: as part of a tail batch."""
        self._tail: list[Drawn] = []
        self._running: dict[int, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ready: dict[int, Group] = {}
        self._intake = Intake(settings)
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self.counts = self._intake.counts
        """Over the run: groups `kept`, `failed`, `uniform`, `stale`, `cancelled`; tokens
        `tokens_dropped` with their group and `tokens_masked` for their age, of those sampled."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """Begins to produce. `state` is that of the checkpoint the trainer resumes from."""
        self.version = version
        self._batches = int(state["batches"]) if state else 0
        self._ready, again, cursor = self._buffer.restore(self._batches, version)
        self._again.extend((drawn, False) for drawn in again)
        if cursor is None and state:
            cursor = state["cursor"]
        if cursor is not None:
            self._tasks.restore(cursor)
        self._expire()
        self._admit()

    async def next_batch(self, version: int) -> list[Group]:
        """The next `groups` groups for a trainer at `version`, lowest numbers first.

        Raises:
            ProductionError: as `Intake.keeps`.
        """
        self.set_version(version)
        self._training = False
        self._admit()
        while (batch := self._take()) is None:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        self._admit()
        return batch

    def set_version(self, version: int) -> None:
        """The engine samples with these weights from now on."""
        if version <= self.version:
            return
        self.version = version
        self._training = False
        for running in list(self._running.values()):
            if self._outlived(running.run.oldest_start):
                self._cancel(running)
        self._expire()
        self._admit()

    def state(self) -> dict[str, Any]:
        """For the checkpoint that contains the effect of every batch so far."""
        return {"batches": self._batches, "cursor": dict(self._tasks.cursor.taken)}

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """The checkpoint with this state is durable."""
        self._buffer.acknowledge(int(state["batches"]))

    def gauges(self) -> dict[str, int]:
        """Groups by where they are now."""
        return {
            "running": len(self._running),
            "ready": len(self._ready),
            "tail": len(self._tail),
            "ending": len(self._ending),
        }

    async def close(self) -> None:
        """Ends every trial; what was running is run again after a resume."""
        running = [*self._ending, *(running.task for running in self._running.values())]
        self._running.clear()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # Admission

    def _wanted(self) -> int:
        """Groups that may be alive: those of the batch that the trainer waits for, and of the
        `max_staleness` batches after it."""
        settings = self._settings
        ahead = settings.groups * settings.max_staleness
        if self._training:
            return ahead
        tail = any(running.tail for running in self._running.values())
        extra = 0 if tail else math.ceil(settings.over_sample * settings.groups)
        return ahead + settings.groups + extra

    def _admit(self) -> None:
        while self._failure is None and len(self._running) + len(self._ready) < self._wanted():
            self._start_group(*self._next())

    def _next(self) -> tuple[Drawn, bool]:
        if len(self._tail) >= self._settings.tail_groups > 0:
            self._again.extend((drawn, True) for drawn in self._tail)
            self._tail.clear()
        if self._again:
            return self._again.popleft()
        number = self._tasks.cursor.draws
        drawn = Drawn(number, self._tasks.draw())
        self._buffer.draw(drawn, self._tasks.cursor.taken)
        return drawn, False

    def _start_group(self, drawn: Drawn, tail: bool) -> None:
        run = GroupRun(
            self._loop,
            drawn.task,
            number=drawn.number,
            size=self._settings.group_size,
            seed=self._seed,
            version=lambda: self.version,
            slots=self._slots,
            straggler_factor=None if tail else self._settings.straggler_factor,
        )
        task = asyncio.get_running_loop().create_task(self._produce(drawn.number, run))
        self._running[drawn.number] = _Running(drawn, run, task, tail)

    async def _produce(self, number: int, run: GroupRun) -> None:
        try:
            group = await run.run()
        except Exception as error:  # noqa: BLE001 (a fault of ours: it must end the training)
            self._failure = error
        else:
            self._settle(number, group)
        self._running.pop(number, None)
        self._admit()
        self._changed.set()

    def _settle(self, number: int, group: Group) -> None:
        try:
            kept = self._intake.keeps(group)
        except ProductionError as error:
            self._failure = error
            kept = False
        if kept:
            self._buffer.put(number, group)
            self._ready[number] = group
        else:
            self._drop(number, group)

    # Staleness

    def _outlived(self, oldest_start: int | None) -> bool:
        if oldest_start is None:
            return False
        if not self._settings.partial_rollout:
            return True
        return self._settings.stale == "drop" and self._is_stale(oldest_start)

    def _is_stale(self, version: int) -> bool:
        return self.version - version > self._settings.max_staleness

    def _cancel(self, running: _Running) -> None:
        del self._running[running.drawn.number]
        self.counts["cancelled"] += 1
        running.task.cancel()
        self._ending.add(running.task)
        running.task.add_done_callback(self._ending.discard)
        if self._settings.tail_groups:
            self._tail.append(running.drawn)
        else:
            self._buffer.drop([running.drawn.number])

    def _expire(self) -> None:
        for number, group in list(self._ready.items()):
            if not self._is_stale(group.oldest_version):
                continue
            if self._settings.stale == "mask":
                sampled = _tokens(group)
                group = without_stale_tokens(group, self.version - self._settings.max_staleness)
                self.counts["tokens_masked"] += sampled - _tokens(group)
                if judge(group, self._settings) is not Verdict.FAILED:
                    self._ready[number] = group
                    continue
            self.counts["stale"] += 1
            del self._ready[number]
            self._drop(number, group)

    def _drop(self, number: int, group: Group) -> None:
        self.counts["tokens_dropped"] += _tokens(group)
        self._buffer.drop([number])

    # Consumption

    def _take(self) -> list[Group] | None:
        self._expire()
        if len(self._ready) < self._settings.groups or self._awaits_tail():
            return None
        numbers = sorted(self._ready)[: self._settings.groups]
        self._batches += 1
        self._buffer.take(numbers, self._batches)
        self._training = True
        self._intake.batch_is_full()
        return [self._ready.pop(number) for number in numbers]

    def _awaits_tail(self) -> bool:
        """A tail group that the next update would make too old is waited for: it was cancelled
        for its age before."""
        bound = self.version - self._settings.max_staleness
        starts = [running.run.oldest_start for running in self._running.values() if running.tail]
        return any(start is not None and start <= bound for start in starts)


def _tokens(group: Group) -> int:
    return sum(rollout.sampled_tokens for rollout in group.rollouts)
