"""The asynchronous producer: trials run while the trainer trains, within a bound on staleness.

Invariant: the staleness of every batch is at most `max_staleness`. It is enforced twice:

    at admission     no more groups run than the next `max_staleness` + 1 batches need
    at consumption   a group that is nevertheless too old (a straggler) is dropped or masked
                     (`staleness.py`)

With `max_staleness` 0 no group is started while the trainer trains, and the batches are equal to
those of the synchronous producer with the same seed.

    draw ──▶ running ──▶ judged ──▶ ready ──▶ taken (a batch, lowest group numbers first)
               │            └─▶ dropped: failed, uniform
               └─▶ cancelled: too old ──▶ tail (run again, without over-sampling) or dropped
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from agent_loop.producers.buffer import Drawn, ReplayBuffer, Tail, Written
from agent_loop.producers.groups import (
    GroupRun,
    Intake,
    ProductionError,
)
from agent_loop.producers.protocol import Production, RunsTrials
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.slots import TrialSlots
from agent_loop.producers.staleness import fresh_part, is_cancelled
from agent_loop.records import Group
from agent_loop.tasks import TaskStream


@dataclass(slots=True)
class _Running:
    drawn: Drawn
    run: GroupRun
    task: asyncio.Task[None]

    @property
    def tail(self) -> bool:
        return self.drawn.tail is Tail.RELEASED


class AsyncProducer:
    """Example:
    async with AsyncProducer(loop, tasks, config, seed=0, buffer=buffer) as producer:
        producer.start(version=0)
        groups = await producer.next_batch(version=0)
        ...                                     # train, update the engine's weights
        producer.set_version(1)
    """

    def __init__(
        self,
        loop: RunsTrials,
        tasks: TaskStream,
        config: RolloutConfig,
        *,
        seed: int,
        buffer: ReplayBuffer,
    ) -> None:
        self._loop = loop
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._buffer = buffer
        self._slots = TrialSlots(config.concurrency)
        self.version = 0
        """Version of the weights that the engine samples with."""
        self._batches = 0
        self._training = False
        self._again: deque[Drawn] = deque()
        """Groups to run before any new group is drawn."""
        self._tail: list[Drawn] = []
        self._running: dict[int, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ready: dict[int, Group] = {}
        self.intake = Intake(config)
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self.counts = self.intake.counts
        """Counts over the run: groups by outcome (`kept`, `failed`, `uniform`, `stale`,
        `cancelled`), and sampled tokens that are not trained: `tokens_dropped` with their group,
        `tokens_masked` because of their age."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """Starts production. `state` comes from the checkpoint that the trainer resumes from."""
        self.version = version
        self._batches = int(state["batches"]) if state else 0
        restored = self._buffer.restore(self._batches, version)
        self._ready = dict(restored.ready)
        for drawn in restored.again:
            waits = drawn.tail is Tail.COLLECTED and self._config.tail_groups > 0
            (self._tail if waits else self._again).append(drawn)
        saved = state or {}
        if (cursor := restored.cursor or saved.get("cursor")) is not None:
            self._tasks.restore(cursor)
        if (intake := restored.intake or saved.get("intake")) is not None:
            self.intake.restore(intake)
        self._expire()
        self._admit()

    async def next_batch(self, version: int) -> list[Group]:
        """The next `groups_per_step` groups for a trainer at `version`, lowest numbers first.

        Raises:
            ProductionError: as `Intake.keeps`.
        """
        self.set_version(version)
        self._training = False
        self._admit()
        while not (numbers := self._complete()):
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        batch, written = self._take(numbers)
        self._admit()
        await written
        return batch

    def set_version(self, version: int) -> None:
        """To be called when the engine samples with the weights of `version`."""
        if version <= self.version:
            return
        self.version = version
        self._training = False
        for running in list(self._running.values()):
            if is_cancelled(running.run.oldest_start, self.version, self._config):
                self._cancel(running)
        self._expire()
        self._admit()

    @property
    def production(self) -> Production:
        config = self._config
        return Production(
            len(self._ready), config.groups_per_step, len(self._running), config.max_staleness
        )

    def pause(self) -> None:
        """Starts no trial until `resume`; an evaluation uses the engines. Running trials
        continue."""
        self._slots.pause()

    def resume(self) -> None:
        self._slots.resume()

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint that contains the effect of every batch so far."""
        return {
            "batches": self._batches,
            "cursor": self._tasks.state(),
            "intake": self.intake.state(),
        }

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """To be called when the checkpoint with this state is durable."""
        self._watch(self._buffer.acknowledge(int(state["batches"])))

    async def close(self) -> None:
        """Ends every trial. Groups that were running are run again when the run is resumed."""
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
        """Number of groups that may be running or ready: enough for the batch that the trainer
        waits for and for the `max_staleness` batches after it."""
        config = self._config
        ahead = config.groups_per_step * config.max_staleness
        if self._training:
            return ahead
        tail = any(running.tail for running in self._running.values())
        extra = 0 if tail else math.ceil(config.over_sample * config.groups_per_step)
        return ahead + config.groups_per_step + extra

    def _admit(self) -> None:
        while self._failure is None and len(self._running) + len(self._ready) < self._wanted():
            if len(self._tail) >= self._config.tail_groups > 0:
                self._release_tail()
            if self._again:
                drawn = self._again.popleft()
                self._start_group(drawn, None)
            else:
                drawn = Drawn(self._tasks.cursor.draws, self._tasks.draw())
                self._start_group(drawn, self._buffer.draw(drawn, self._tasks.state()))

    def _release_tail(self) -> None:
        for drawn in self._tail:
            self._watch(self._buffer.set_tail(drawn.number, Tail.RELEASED))
            self._again.append(replace(drawn, tail=Tail.RELEASED))
        self._tail.clear()

    def _start_group(self, drawn: Drawn, written: Written | None) -> None:
        """`written` is done once the group is in the buffer; None: it is already in the buffer."""
        tail = drawn.tail is Tail.RELEASED
        run = GroupRun(
            self._loop,
            drawn.task,
            number=drawn.number,
            size=self._config.group_size,
            seed=self._seed,
            version=lambda: self.version,
            slots=self._slots,
            straggler_factor=None if tail else self._config.straggler_factor,
        )
        task = asyncio.get_running_loop().create_task(self._produce(drawn.number, run, written))
        self._running[drawn.number] = _Running(drawn, run, task)

    async def _produce(self, number: int, run: GroupRun, written: Written | None) -> None:
        try:
            if written is not None:
                await written
            self._settle(number, await run.run())
            self._running.pop(number, None)
            self._admit()
        except Exception as error:  # noqa: BLE001 (of a task source, or a bug: it ends the training)
            self._running.pop(number, None)
            self._failure = error
        self._changed.set()

    def _settle(self, number: int, group: Group) -> None:
        try:
            kept = self.intake.keeps(group)
        except ProductionError as error:
            self._failure = error
            kept = False
        self._watch(self._buffer.set_intake(self.intake.state()))
        if kept:
            self._watch(self._buffer.put(number, group))
            self._ready[number] = group
        else:
            self._drop(number, group)

    # Staleness

    def _cancel(self, running: _Running) -> None:
        del self._running[running.drawn.number]
        self.counts["cancelled"] += 1
        running.task.cancel()
        self._ending.add(running.task)
        running.task.add_done_callback(self._ending.discard)
        if self._config.tail_groups:
            self._tail.append(replace(running.drawn, tail=Tail.COLLECTED))
            self._watch(self._buffer.set_tail(running.drawn.number, Tail.COLLECTED))
        else:
            self._watch(self._buffer.drop([running.drawn.number]))

    def _expire(self) -> None:
        for number, group in list(self._ready.items()):
            fresh = fresh_part(group, self.version, self._config)
            if fresh is None:
                self.counts["stale"] += 1
                self.intake.left_out(group, "stale")
                del self._ready[number]
                self._drop(number, group)
            elif fresh is not group:
                self.counts["tokens_masked"] += _tokens(group) - _tokens(fresh)
                self._ready[number] = fresh

    def _drop(self, number: int, group: Group) -> None:
        self.counts["tokens_dropped"] += _tokens(group)
        self._watch(self._buffer.drop([number]))

    def _watch(self, written: Written) -> None:
        """Makes a failed write end the training."""
        written.add_done_callback(self._wrote)

    def _wrote(self, written: Written) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            self._failure = error
            self._changed.set()

    # Consumption

    def _complete(self) -> list[int]:
        """The numbers of the next batch's groups; empty as long as the batch is incomplete."""
        self._expire()
        if len(self._ready) < self._config.groups_per_step or self._awaits_tail():
            return []
        return sorted(self._ready)[: self._config.groups_per_step]

    def _take(self, numbers: list[int]) -> tuple[list[Group], Written]:
        self._batches += 1
        self._training = True
        self.intake.batch_is_full()
        self._watch(self._buffer.set_intake(self.intake.state()))
        written = self._buffer.take(numbers, self._batches)
        return [self._ready.pop(number) for number in numbers], written

    def _awaits_tail(self) -> bool:
        """Whether the batch must wait for a tail group, which was cancelled for its age before and
        which the next update would cancel again."""
        return any(
            is_cancelled(running.run.oldest_start, self.version + 1, self._config)
            for running in self._running.values()
            if running.tail
        )


def _tokens(group: Group) -> int:
    return sum(rollout.sampled_tokens for rollout in group.rollouts)
