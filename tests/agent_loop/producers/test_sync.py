"""The synchronous producer: complete batches, in an order that does not depend on scheduling."""

from __future__ import annotations

import asyncio
import json

import pytest

from agent_loop.producers.groups import GroupRun, Intake, ProductionError, rollout_seed
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Task
from agent_loop.tasks import Source, TaskStream
from tests.agent_loop.scripted_loop import ScriptedLoop


def stream(seed: int = 0) -> TaskStream:
    return TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(10)])], seed=seed)


def shape(groups: list[Group]) -> list[tuple[str, str, list[int]]]:
    return [(g.group_id, g.task.task_id, [r.seed for r in g.rollouts]) for g in groups]


async def test_batch_has_one_group_for_each_task_of_the_stream() -> None:
    loop = ScriptedLoop()
    settings = RolloutConfig(groups_per_step=3, group_size=4, concurrency=5)
    producer = SyncProducer(loop, stream(), settings, seed=1)
    groups = await producer.next_batch(version=7)
    twin = stream()
    assert [g.task for g in groups] == [twin.draw() for _ in range(3)]
    assert [len(g.rollouts) for g in groups] == [4, 4, 4]
    assert {r.started_version for g in groups for r in g.rollouts} == {7}
    assert len({r.seed for g in groups for r in g.rollouts}) == 12
    assert loop.most_running == 5
    assert [g.group_id for g in await producer.next_batch(8)] == ["g3", "g4", "g5"]


async def test_order_does_not_depend_on_how_long_trials_take() -> None:
    settings = RolloutConfig(groups_per_step=3, group_size=4, concurrency=6)
    slow = ScriptedLoop(duration=lambda seed: seed % 5 / 200)
    one = await SyncProducer(ScriptedLoop(), stream(), settings, seed=1).next_batch(0)
    two = await SyncProducer(slow, stream(), settings, seed=1).next_batch(0)
    other = await SyncProducer(slow, stream(), settings, seed=2).next_batch(0)
    assert shape(one) == shape(two) != shape(other)


async def test_failed_rollout_stays_in_its_group_untrainable() -> None:
    loop = ScriptedLoop(fails=lambda task, seed: seed % 2 == 0)
    settings = RolloutConfig(groups_per_step=2, group_size=8)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    trainable = [r.trainable for g in groups for r in g.rollouts]
    assert trainable == [r.seed % 2 == 1 for g in groups for r in g.rollouts]
    assert any(trainable)


async def test_failed_group_is_replaced_by_a_group_of_another_task() -> None:
    bad = {"a0", "a1", "a2"}
    loop = ScriptedLoop(fails=lambda task, seed: task.task_id in bad)
    settings = RolloutConfig(groups_per_step=6, group_size=2)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    assert len(groups) == 6
    assert not {group.task.task_id for group in groups} & bad


async def test_batch_without_a_usable_rollout_ends_the_run_with_the_reason() -> None:
    loop = ScriptedLoop(fails=lambda task, seed: True)
    producer = SyncProducer(loop, stream(), RolloutConfig(groups_per_step=2, group_size=2), seed=0)
    with pytest.raises(ProductionError, match=r"in 4 trials, 4 of them .*: scripted failure"):
        await producer.next_batch(0)


async def test_batch_is_filled_with_uniform_groups_if_every_group_is_uniform() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: 1.0)
    settings = RolloutConfig(
        groups_per_step=2, group_size=3, drop_uniform_groups=True, max_resamples=3
    )
    producer = SyncProducer(loop, stream(), settings, seed=0)
    for number in (1, 2):
        groups = await producer.next_batch(0)
        assert len(groups) == 2
        assert loop.started == number * 3 * 2 * 3
    assert producer.counts == {"uniform": 12, "no_signal": 12}


def is_of_an_odd_task(group: Group) -> bool:
    return int(group.task.task_id[1:]) % 2 == 1


def no_group(group: Group) -> bool:
    return False


def all_uniform(own_filter: str) -> SyncProducer:
    """A producer whose groups are all uniform and also pass a filter."""
    loop = ScriptedLoop(reward=lambda task, seed: 1.0)
    settings = {
        "groups_per_step": 2,
        "group_size": 3,
        "max_resamples": 3,
        "drop_uniform_groups": True,
        "filter": f"{__name__}:{own_filter}",
    }
    return SyncProducer(loop, stream(), RolloutConfig.model_validate(settings), seed=0)


async def test_uniform_groups_fill_a_batch_only_if_the_filter_keeps_them() -> None:
    producer = all_uniform("is_of_an_odd_task")
    for _ in range(5):
        assert all(map(is_of_an_odd_task, await producer.next_batch(0)))


async def test_filter_that_leaves_out_every_uniform_group_ends_the_run() -> None:
    with pytest.raises(ProductionError, match="no_group left out 6 groups in a row"):
        await all_uniform("no_group").next_batch(0)


async def test_groups_without_signal_are_counted_even_if_they_are_kept() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: 1.0)
    settings = RolloutConfig(groups_per_step=2, group_size=3)
    producer = SyncProducer(loop, stream(), settings, seed=0)
    await producer.next_batch(0)
    assert producer.counts == {"kept": 2, "no_signal": 2}


async def test_failures_before_a_checkpoint_count_towards_the_bound_after_it() -> None:
    """10 groups in a row with too few rollouts end the run; the producer is resumed after 8."""
    bad = {rollout_seed(0, number, place) for number in range(50) for place in range(1, 4)}
    settings = RolloutConfig(groups_per_step=2, group_size=4, min_group_size=3, max_resamples=5)
    first = Intake(settings)
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    for number in range(8):
        run = GroupRun(
            loop,
            Task("a", {}),
            number=number,
            size=4,
            seed=0,
            version=lambda: 0,
            slots=asyncio.Semaphore(4),
        )
        assert not first.keeps(await run.run())
    tasks = stream()
    for _ in range(8):
        tasks.draw()
    state = {"cursor": dict(tasks.cursor.taken), "intake": json.loads(json.dumps(first.state()))}
    loop.started = 0
    producer = SyncProducer(loop, stream(), settings, seed=0)
    producer.start(0, state)
    with pytest.raises(ProductionError, match=r"10 groups in a row .* 30 of 40 .* 30 of them"):
        await producer.next_batch(0)
    assert loop.started == 8


async def test_run_ends_when_every_group_has_too_few_rollouts() -> None:
    """Every group has at least one trainable rollout, so that the smaller limit does not apply."""
    bad = {rollout_seed(0, number, place) for number in range(50) for place in range(1, 4)}
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    settings = RolloutConfig(groups_per_step=2, group_size=4, min_group_size=3, max_resamples=5)
    producer = SyncProducer(loop, stream(), settings, seed=0)
    said = r"10 groups in a row have fewer than 3 usable .* 30 of 40 .* 30 of them .* failure"
    with pytest.raises(ProductionError, match=said):
        await producer.next_batch(0)
    assert loop.started == 40


async def test_groups_with_too_few_rollouts_between_others_do_not_end_the_run() -> None:
    bad = {rollout_seed(0, n, place) for n in range(50) if n % 5 for place in range(1, 4)}
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    settings = RolloutConfig(groups_per_step=6, group_size=4, min_group_size=3, max_resamples=1)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    assert [group.group_id for group in groups] == ["g0", "g5", "g10", "g15", "g20", "g25"]
