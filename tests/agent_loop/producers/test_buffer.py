"""The replay buffer: it writes outside the event loop, and restores the producer's state."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

from agent_loop.producers import buffer as buffer_module
from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import Drawn, ReplayBuffer, Tail
from agent_loop.producers.groups import ProductionError, rollout_seed
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.rollout_format import encode_group
from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from agent_loop.tasks import Source, TaskStream
from tests.agent_loop.scripted_loop import ScriptedLoop
from tests.agent_loop.virtual_time import run_in_virtual_time

TASK = Task("a0", {}, "a")


def group(tokens: int) -> Group:
    segment = Segment(
        -1,
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, bool),
        np.zeros(tokens, np.float32),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.int32),
    )
    return Group("g0", TASK, (Rollout("t", TASK, RolloutStatus.DONE, 1.0, (segment,)),))


async def test_event_loop_continues_while_a_group_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write does not finish until the event loop has noticed its start; a write in the event
    loop itself would never finish."""
    started, may_go_on = threading.Event(), threading.Event()

    def slow_encode(of: Group) -> bytes:
        started.set()
        assert may_go_on.wait(60)
        return encode_group(of)

    monkeypatch.setattr(buffer_module, "encode_group", slow_encode)
    buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
    await buffer.draw(Drawn(0, TASK), {"a": 1})
    written = buffer.put(0, group(1_000_000))
    await asyncio.to_thread(started.wait, 60)
    assert not written.done()
    may_go_on.set()
    await written
    assert len(buffer.restore(0, 0).ready[0].rollouts[0].segments[0].ids) == 1_000_000
    buffer.close()


async def test_restored_tail_groups_are_still_tail_groups(tmp_path: Path) -> None:
    first = ReplayBuffer(tmp_path / "buffer.sqlite")
    for number in range(3):
        await first.draw(Drawn(number, TASK), {"a": number + 1})
    await first.set_tail(0, Tail.COLLECTED)
    await first.set_tail(1, Tail.RELEASED)
    first.close()
    second = ReplayBuffer(tmp_path / "buffer.sqlite")
    again = second.restore(0, 0).again
    assert [drawn.tail for drawn in again] == [Tail.COLLECTED, Tail.RELEASED, Tail.NONE]
    second.close()


def test_resumed_producer_continues_to_collect_and_waits_for_its_tail_groups(
    tmp_path: Path,
) -> None:
    policy = RolloutConfig(groups_per_step=1, group_size=1, max_staleness=0, tail_groups=2)

    async def main() -> int:
        buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
        for number in range(2):
            buffer.draw(Drawn(number, Task(f"a{number}", {}, "a")), {"a": number + 1})
        buffer.set_tail(0, Tail.COLLECTED)
        buffer.set_tail(1, Tail.RELEASED)
        tasks = TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(9)])], seed=0)
        loop = ScriptedLoop(duration=lambda seed: 1.0)
        async with AsyncProducer(loop, tasks, policy, seed=0, buffer=buffer) as producer:
            producer.start(0)
            tails = len(producer._tail)
            (batch,) = await producer.next_batch(0)
            assert batch.group_id == "g1"
        buffer.close()
        return tails

    assert run_in_virtual_time(main()) == 1


def test_resumed_producer_continues_its_count_of_failed_groups(tmp_path: Path) -> None:
    """Every group has too few rollouts. 8 such groups in a row end the run: 4 before the resume and
    4 after it."""
    policy = RolloutConfig(groups_per_step=2, group_size=2, min_group_size=2, max_resamples=4)
    bad = {rollout_seed(0, number, 1) for number in range(99)}
    loop = ScriptedLoop(duration=lambda seed: 1.0, fails=lambda task, seed: seed in bad)

    async def life(timeout_s: float) -> int:
        tasks = TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(99)])], seed=0)
        buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
        try:
            async with AsyncProducer(loop, tasks, policy, seed=0, buffer=buffer) as producer:
                producer.start(0)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(producer.next_batch(0), timeout_s)
                return producer.counts["failed"]
        finally:
            buffer.close()

    assert run_in_virtual_time(life(1.5)) == 4
    with pytest.raises(ProductionError, match="8 groups in a row"):
        run_in_virtual_time(life(1.5))
