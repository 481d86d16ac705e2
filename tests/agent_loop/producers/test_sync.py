"""The synchronous producer: whole batches, in an order that scheduling cannot change."""

from __future__ import annotations

import pytest

from agent_loop.producers.groups import BatchSettings, ProductionError, rollout_seed
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Group, Task
from agent_loop.tasks import Source, TaskStream
from tests.agent_loop.scripted_loop import ScriptedLoop


def stream(seed: int = 0) -> TaskStream:
    return TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(10)])], seed=seed)


def shape(groups: list[Group]) -> list[tuple[str, str, list[int]]]:
    return [(g.group_id, g.task.task_id, [r.seed for r in g.rollouts]) for g in groups]


async def test_batch_is_the_streams_tasks_in_groups() -> None:
    loop = ScriptedLoop()
    settings = BatchSettings(groups=3, group_size=4, max_concurrent=5)
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
    settings = BatchSettings(groups=3, group_size=4, max_concurrent=6)
    slow = ScriptedLoop(duration=lambda seed: seed % 5 / 200)
    one = await SyncProducer(ScriptedLoop(), stream(), settings, seed=1).next_batch(0)
    two = await SyncProducer(slow, stream(), settings, seed=1).next_batch(0)
    other = await SyncProducer(slow, stream(), settings, seed=2).next_batch(0)
    assert shape(one) == shape(two) != shape(other)


async def test_failed_rollout_stays_in_its_group_untrainable() -> None:
    loop = ScriptedLoop(fails=lambda task, seed: seed % 2 == 0)
    settings = BatchSettings(groups=2, group_size=8)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    trainable = [r.trainable for g in groups for r in g.rollouts]
    assert trainable == [r.seed % 2 == 1 for g in groups for r in g.rollouts]
    assert any(trainable)


async def test_group_that_failed_is_replaced_by_another_tasks() -> None:
    bad = {"a0", "a1", "a2"}
    loop = ScriptedLoop(fails=lambda task, seed: task.task_id in bad)
    settings = BatchSettings(groups=6, group_size=2)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    assert len(groups) == 6
    assert not {group.task.task_id for group in groups} & bad


async def test_batch_without_a_single_rollout_says_why_and_stops() -> None:
    loop = ScriptedLoop(fails=lambda task, seed: True)
    producer = SyncProducer(loop, stream(), BatchSettings(groups=2, group_size=2), seed=0)
    with pytest.raises(ProductionError, match=r"in 4 trials, 4 of them .*: scripted failure"):
        await producer.next_batch(0)


async def test_batch_is_filled_up_when_every_group_is_filtered() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: 1.0)
    settings = BatchSettings(groups=2, group_size=3, drop_uniform=True, max_resamples=3)
    producer = SyncProducer(loop, stream(), settings, seed=0)
    for number in (1, 2):
        groups = await producer.next_batch(0)
        assert len(groups) == 2
        assert loop.started == number * 3 * 2 * 3
    assert producer.counts == {"uniform": 12}


async def test_run_ends_when_every_group_has_too_few_rollouts() -> None:
    """Each of them has some, so that none is hopeless."""
    bad = {rollout_seed(0, number, place) for number in range(50) for place in range(1, 4)}
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    settings = BatchSettings(groups=2, group_size=4, min_group_size=3, max_resamples=5)
    producer = SyncProducer(loop, stream(), settings, seed=0)
    said = r"10 groups in a row have fewer than 3 usable .* 30 of 40 .* 30 of them .* failure"
    with pytest.raises(ProductionError, match=said):
        await producer.next_batch(0)
    assert loop.started == 40


async def test_groups_with_too_few_rollouts_between_others_do_not_end_the_run() -> None:
    bad = {rollout_seed(0, n, place) for n in range(50) if n % 5 for place in range(1, 4)}
    loop = ScriptedLoop(fails=lambda task, seed: seed in bad)
    settings = BatchSettings(groups=6, group_size=4, min_group_size=3, max_resamples=1)
    groups = await SyncProducer(loop, stream(), settings, seed=0).next_batch(0)
    assert [group.group_id for group in groups] == ["g0", "g5", "g10", "g15", "g20", "g25"]
