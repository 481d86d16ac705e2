"""The asynchronous producer's policies, in virtual time: each test takes milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.producers.groups import ProductionError, rollout_seed
from agent_loop.producers.protocol import Production
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.rollout_format import encode_group
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, RolloutStatus, Task
from agent_loop.tasks import Source, TaskStream
from tests.agent_loop.scripted_loop import ScriptedLoop
from tests.agent_loop.virtual_time import run_in_virtual_time

TRAIN_S = 10.0


def stream(size: int = 40, seed: int = 0) -> TaskStream:
    return TaskStream([Source("a", [Task(f"a{i}", {"i": i}, "a") for i in range(size)])], seed=seed)


def long_tailed(seed: int) -> float:
    return float(np.random.default_rng(seed).lognormal(1.0, 1.2))


async def train(
    producer: AsyncProducer | SyncProducer, steps: int, first: int = 0
) -> list[list[Group]]:
    """A trainer's loop: takes a batch, trains on it for a while, and updates the weights."""
    batches = []
    for version in range(first, first + steps):
        batches.append(await producer.next_batch(version))
        await asyncio.sleep(TRAIN_S)
        if isinstance(producer, AsyncProducer):
            producer.set_version(version + 1)
    return batches


@asynccontextmanager
async def producing(
    loop: ScriptedLoop, policy: RolloutConfig, *, path: Path | str = ":memory:", tasks: int = 40
) -> AsyncIterator[AsyncProducer]:
    """A producer with a buffer of its own; both are closed at the end."""
    with closing(ReplayBuffer(path)) as buffer:
        async with AsyncProducer(loop, stream(tasks), policy, seed=3, buffer=buffer) as producer:
            yield producer


def produce(
    loop: ScriptedLoop,
    steps: int = 6,
    *,
    check: Callable[[AsyncProducer], None] | None = None,
    tasks: int = 40,
    follow_version: bool = False,
    **policy: Any,
) -> list[list[Group]]:
    async def main() -> list[list[Group]]:
        async with producing(loop, RolloutConfig(**policy), tasks=tasks) as producer:
            if follow_version:
                loop.version_now = lambda: producer.version
            producer.start(0)
            batches = await train(producer, steps)
            if check:
                check(producer)
        return batches

    batches = run_in_virtual_time(main())
    assert loop.running == 0
    return batches


def staleness(batches: list[list[Group]]) -> int:
    return max(v - g.oldest_version for v, groups in enumerate(batches) for g in groups)


def content(batches: list[list[Group]]) -> list[list[bytes]]:
    """The groups, encoded without the trials' ids, which depend on the order of the starts."""
    return [[encode_group(without_ids(group)) for group in groups] for groups in batches]


def without_ids(group: Group) -> Group:
    rollouts = tuple(replace(rollout, trial_id="") for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def test_production_is_how_far_the_next_batch_is() -> None:
    async def main() -> list[Production]:
        loop = ScriptedLoop(duration=lambda seed: 5.0)
        policy = RolloutConfig(groups_per_step=2, group_size=2, concurrency=4, max_staleness=1)
        async with producing(loop, policy) as producer:
            producer.start(0)
            seen = [producer.production]
            await producer.next_batch(0)
            return [*seen, producer.production]

    before, after = run_in_virtual_time(main())
    assert before == Production(ready=0, needed=2, running=4, max_staleness=1)
    assert after.ready + after.running == 2


@settings(max_examples=40, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(1, 4),
    concurrency=st.integers(1, 20),
    drop_uniform_groups=st.booleans(),
    failing=st.sampled_from([0, 5]),
)
def test_batches_without_staleness_equal_those_of_the_synchronous_producer(
    groups_per_step: int, group_size: int, concurrency: int, drop_uniform_groups: bool, failing: int
) -> None:
    batch: dict[str, Any] = {
        "groups_per_step": groups_per_step,
        "group_size": group_size,
        "concurrency": concurrency,
        "drop_uniform_groups": drop_uniform_groups and group_size > 1,
        "max_resamples": 1000,
    }

    def loop() -> ScriptedLoop:
        return ScriptedLoop(
            duration=long_tailed, fails=lambda _, seed: bool(failing) and seed % failing == 0
        )

    async def synchronous() -> list[list[Group]]:
        return await train(SyncProducer(loop(), stream(), RolloutConfig(**batch), seed=3), 4)

    try:
        expected = content(run_in_virtual_time(synchronous()))
    except ProductionError:
        return
    assert content(produce(loop(), 4, max_staleness=0, **batch)) == expected


@settings(max_examples=60, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    stale=st.sampled_from(["drop", "mask"]),
    over_sample=st.sampled_from([0.0, 0.5]),
    partial=st.booleans(),
    tail_groups=st.sampled_from([0, 2]),
    spread=st.floats(0.1, 3.0),
)
def test_no_batch_exceeds_max_staleness_and_no_rollout_is_returned_twice(
    max_staleness: int,
    stale: str,
    over_sample: float,
    partial: bool,
    tail_groups: int,
    spread: float,
) -> None:
    loop = ScriptedLoop(duration=lambda seed: long_tailed(seed) ** spread)
    batches = produce(
        loop,
        groups_per_step=3,
        group_size=2,
        concurrency=30,
        max_staleness=max_staleness,
        stale=stale,
        over_sample=over_sample,
        partial_rollout=partial,
        tail_groups=tail_groups,
    )
    assert [len(groups) for groups in batches] == [3] * 6
    assert staleness(batches) <= max_staleness
    ids = [group.group_id for groups in batches for group in groups]
    assert len(ids) == len(set(ids))


def test_straggler_that_is_too_old_is_dropped_while_other_groups_continue() -> None:
    slow = [True]

    def duration(seed: int) -> float:
        return 100 * TRAIN_S if slow and slow.pop() else 1.0

    loop = ScriptedLoop(duration=duration)

    def check(producer: AsyncProducer) -> None:
        assert producer.counts["cancelled"] == 1

    batches = produce(loop, groups_per_step=2, group_size=1, max_staleness=2, check=check)
    assert "g0" not in [g.group_id for groups in batches for g in groups]
    assert staleness(batches) <= 2


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_cancelled_tasks_are_run_again_as_tail_groups_that_the_batch_waits_for(
    partial_rollout: bool,
) -> None:
    """Task a0 takes as long as ten updates. Without tail groups it would never be trained."""
    loop = ScriptedLoop()
    tasks = stream(40)
    slow_task = tasks.draw().task_id
    loop.task_duration = lambda task: 10 * TRAIN_S if task.task_id == slow_task else 1.0

    def trained(tail_groups: int) -> bool:
        batches = produce(
            loop, 12, tasks=40, groups_per_step=2, group_size=2, over_sample=0.5, max_staleness=1,
            tail_groups=tail_groups, partial_rollout=partial_rollout,
        )  # fmt: skip
        return any(group.task.task_id == slow_task for groups in batches for group in groups)

    assert trained(tail_groups=1)
    assert not trained(tail_groups=0)


def test_over_sampling_forms_the_batch_from_the_groups_that_finish_first() -> None:
    def wall_s(over_sample: float) -> float:
        async def main() -> float:
            policy = RolloutConfig(
                groups_per_step=4, group_size=2, max_staleness=0, over_sample=over_sample
            )
            async with producing(ScriptedLoop(duration=long_tailed), policy) as producer:
                producer.start(0)
                await train(producer, 8)
            return asyncio.get_running_loop().time()

        return run_in_virtual_time(main())

    assert wall_s(1.0) < wall_s(0.5) < wall_s(0.0)


def test_partial_rollouts_continue_across_an_update_with_both_versions() -> None:
    def run(partial_rollout: bool) -> tuple[int, set[tuple[int, int]]]:
        loop = ScriptedLoop(duration=lambda seed: 1.5 * TRAIN_S)
        cancelled = []

        def check(producer: AsyncProducer) -> None:
            cancelled.append(producer.counts["cancelled"])

        batches = produce(
            loop, check=check, follow_version=True,
            groups_per_step=2, group_size=1, max_staleness=3, partial_rollout=partial_rollout,
        )  # fmt: skip
        spans = {(g.oldest_version, g.rollouts[0].newest_version) for b in batches for g in b}
        return cancelled[0], spans

    cancelled, spans = run(partial_rollout=True)
    assert cancelled == 0
    assert any(oldest < newest for oldest, newest in spans)
    cancelled, spans = run(partial_rollout=False)
    assert cancelled > 0
    assert all(oldest == newest for oldest, newest in spans)


def test_masking_keeps_the_fresh_tokens_of_a_straggler_and_dropping_does_not() -> None:
    def trained_in_g0(stale: str) -> list[list[int]]:
        slow = [True]

        def duration(seed: int) -> float:
            return 3.5 * TRAIN_S if slow and slow.pop() else 1.0

        batches = produce(
            ScriptedLoop(duration=duration), follow_version=True,
            groups_per_step=2, group_size=1, max_staleness=2, stale=stale,
        )  # fmt: skip
        assert staleness(batches) <= 2
        return [
            segment.versions[segment.mask].tolist()
            for groups in batches
            for group in groups
            for segment in group.rollouts[0].segments
            if group.group_id == "g0"
        ]

    assert trained_in_g0("mask") == [[3]]
    assert trained_in_g0("drop") == []


def test_uniform_groups_are_replaced_and_counted() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: float(int(task.task_id[1:]) % 2 and seed % 2))

    def check(producer: AsyncProducer) -> None:
        assert producer.counts["uniform"] > 0
        assert producer.counts["tokens_dropped"] >= 8 * producer.counts["uniform"]

    batches = produce(
        loop,
        check=check,
        groups_per_step=2,
        group_size=4,
        drop_uniform_groups=True,
        max_resamples=99,
    )
    for groups in batches:
        for group in groups:
            assert len({rollout.reward for rollout in group.rollouts}) == 2


def test_batch_is_filled_with_uniform_groups_if_no_group_has_signal() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: 0.0)
    batches = produce(
        loop,
        3,
        max_staleness=0,
        groups_per_step=2,
        group_size=2,
        drop_uniform_groups=True,
        max_resamples=3,
    )
    assert [len(groups) for groups in batches] == [2, 2, 2]
    assert loop.started == 3 * 2 * 2 * 3


def test_straggling_trial_is_aborted_and_its_group_continues() -> None:
    slow = [True]

    def duration(seed: int) -> float:
        return 500.0 if slow and slow.pop() else 2.0

    batches = produce(
        ScriptedLoop(duration=duration), 1,
        groups_per_step=1, group_size=4, max_staleness=0, straggler_factor=3.0,
    )  # fmt: skip
    ((group,),) = batches
    assert [rollout.status for rollout in group.rollouts] == [
        RolloutStatus.ABORTED,
        *[RolloutStatus.DONE] * 3,
    ]
    assert "6.0 s is 3.0 times" in (group.rollouts[0].error or "")


def test_trials_that_fail_at_once_do_not_make_other_trials_stragglers() -> None:
    quick = {rollout_seed(3, 0, place) for place in range(3)}
    loop = ScriptedLoop(
        duration=lambda seed: 0.01 if seed in quick else 30.0,
        fails=lambda task, seed: seed in quick,
    )
    ((group,),) = produce(
        loop, 1, groups_per_step=1, group_size=5, max_staleness=0, straggler_factor=2.0
    )
    statuses = [rollout.status for rollout in group.rollouts]
    assert statuses == [RolloutStatus.FAILED] * 3 + [RolloutStatus.DONE] * 2


def test_group_can_consist_of_one_rollout() -> None:
    batches = produce(ScriptedLoop(), groups_per_step=3, group_size=1)
    assert all(len(group.rollouts) == 1 for groups in batches for group in groups)


def test_group_with_too_few_rollouts_is_replaced() -> None:
    loop = ScriptedLoop(fails=lambda task, seed: seed % 3 == 0)
    batches = produce(loop, groups_per_step=2, group_size=4, min_group_size=3, max_staleness=0)
    for groups in batches:
        for group in groups:
            assert sum(rollout.trainable for rollout in group.rollouts) >= 3


def test_production_stops_when_everything_fails() -> None:
    with pytest.raises(ProductionError, match="scripted failure"):
        produce(ScriptedLoop(fails=lambda *_: True), groups_per_step=2, group_size=2)


def test_production_stops_when_every_group_has_too_few_rollouts() -> None:
    bad = {rollout_seed(3, number, place) for number in range(99) for place in range(1, 4)}
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    with pytest.raises(ProductionError, match="8 groups in a row have fewer than 2 usable"):
        produce(loop, groups_per_step=2, group_size=4, min_group_size=2)


def test_bug_in_the_loop_ends_the_training() -> None:
    def broken(seed: int) -> float:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ExceptionGroup) as error:
        produce(ScriptedLoop(duration=broken), groups_per_step=2, group_size=2)
    assert error.group_contains(ZeroDivisionError)


def test_nothing_starts_while_training_without_staleness() -> None:
    loop = ScriptedLoop(duration=lambda seed: 1.0)

    async def main() -> None:
        policy = RolloutConfig(groups_per_step=2, group_size=2, max_staleness=0)
        async with producing(loop, policy) as producer:
            producer.start(0)
            await producer.next_batch(0)
            await asyncio.sleep(TRAIN_S)
            assert loop.started == 4
            producer.set_version(1)
            await asyncio.sleep(TRAIN_S)
            assert loop.started == 8

    run_in_virtual_time(main())


def test_resumed_run_neither_loses_nor_repeats_a_group(tmp_path: Path) -> None:
    """The run is killed after two batches, one of which is in a checkpoint. The second batch is
    returned again, groups that were sampled by lost weights are run again, and every drawn task is
    trained once."""
    policy = RolloutConfig(groups_per_step=3, group_size=2, max_staleness=2)

    async def killed() -> tuple[list[Group], dict[str, Any], list[Group]]:
        loop = ScriptedLoop(duration=long_tailed)
        async with producing(loop, policy, path=tmp_path / "buffer.sqlite") as producer:
            producer.start(0)
            (first,) = await train(producer, 1)
            state = producer.state()
            producer.acknowledge(state)
            (second,) = await train(producer, 1, first=1)
        return first, state, second

    async def resumed(state: dict[str, Any]) -> list[list[Group]]:
        loop = ScriptedLoop(duration=long_tailed)
        async with producing(loop, policy, path=tmp_path / "buffer.sqlite") as producer:
            producer.start(1, state)
            return await train(producer, 4, first=1)

    first, state, second = run_in_virtual_time(killed())
    later = run_in_virtual_time(resumed(state))
    names = [group.group_id for group in [*first, *(g for groups in later for g in groups)]]
    assert len(names) == len(set(names))
    assert {group.group_id for group in second} <= set(names)
    numbers = sorted(int(name[1:]) for name in names)
    assert numbers[:9] == list(range(9))
    for version, groups in enumerate(later, start=1):
        for group in groups:
            assert all(r.newest_version <= version for r in group.rollouts)


def test_error_of_a_task_source_reaches_the_trainer_that_waits_for_a_batch() -> None:
    class Failing(TaskStream):
        def draw(self) -> Task:
            if self.cursor.draws == 2:
                raise OSError("the tasks cannot be read")
            return super().draw()

    async def main() -> None:
        policy = RolloutConfig(
            groups_per_step=2, group_size=2, max_staleness=0, drop_uniform_groups=True
        )
        loop = ScriptedLoop(duration=lambda seed: 5.0, reward=lambda task, seed: 1.0)
        tasks = Failing([Source("a", [Task("a0", {}, "a")])], seed=0)
        with closing(ReplayBuffer(":memory:")) as buffer:
            async with AsyncProducer(loop, tasks, policy, seed=3, buffer=buffer) as producer:
                producer.start(0)
                await producer.next_batch(0)

    with pytest.raises(OSError, match="cannot be read"):
        run_in_virtual_time(main())
