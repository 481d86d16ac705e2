"""Nothing is lost or done twice: simultaneous ends, a dead trainer's request, full disks, changed
clocks."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.extras.swarm import EngineState, SwarmError
from agent_loop.extras.swarm.client import AsyncSwarmClient
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import Claim, EpisodeView, TrainerHello
from tests.agent_loop.extras.swarm.conftest import TOKEN, RunningSwarm, StartSwarm
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

ONE: dict[str, Any] = {"groups": 1, "group_size": 2}


def producer_of(swarm: RunningSwarm) -> SwarmProducer:
    hello = TrainerHello(
        proxy_url=swarm.trainer.proxy_url, proxy_admin_key=ADMIN_KEY, **swarm.trainer.sections
    )
    return SwarmProducer(swarm.url, swarm.trainer.key, hello)


async def test_only_one_of_two_simultaneous_ends_counts(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    assert await swarm.call(episode) == 200
    async with AsyncSwarmClient(swarm.url, TOKEN) as other:
        both = await asyncio.gather(
            swarm.client.end_episode(episode, reward=1.0),
            other.end_episode(episode, reward=0.0),
            return_exceptions=True,
        )
    refused = [one for one in both if isinstance(one, SwarmError)]
    assert [error.code for error in refused] == ["conflict"]
    assert len(swarm.swarm.episodes.collected) == 1


async def test_simultaneous_end_and_abort_have_one_outcome(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    for _ in range(8):
        episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
        assert await swarm.call(episode) == 200
        ended, aborted = await asyncio.gather(
            swarm.client.end_episode(episode, reward=1.0),
            swarm.client.abort_episode(episode),
            return_exceptions=True,
        )
        late = isinstance(ended, SwarmError) and ended.code == "late"
        assert not isinstance(aborted, BaseException)
        assert aborted.state.value == ("aborted" if late else "ended")


async def test_model_calls_can_have_their_own_rewards(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(**ONE)
    for turn_rewards in ({}, {1: 0.5}):
        episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
        assert await swarm.call(episode) == 200
        assert await swarm.call(episode) == 200
        with pytest.raises(SwarmError, match=r"calls \[2\].* answered calls are \[0, 1\]"):
            await swarm.client.end_episode(episode, reward=1.0, turn_rewards={2: 1.0})
        await swarm.client.end_episode(episode, reward=1.0, turn_rewards=turn_rewards)
    producer = producer_of(swarm)

    (group,) = await producer.next_batch(0)

    await producer.close()
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
    assert [dict(rollout.turn_returns) for rollout in group.rollouts] == [
        {0: 1.0, 1: 1.0},
        {0: 1.0, 1: 1.5},
    ]


async def test_pending_request_of_a_dead_trainer_gets_no_batch(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(**ONE)
    stale = asyncio.create_task(swarm.swarm.next_batch(0, wait_s=60))
    await asyncio.sleep(0)
    await swarm.swarm.trainer_ended(EngineState.ERROR, "killed")
    await swarm.client.start_engine(timeout_s=5)
    with pytest.raises(SwarmError, match="this trainer has ended"):
        await stale
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    batch = await swarm.trainer.next_batch()
    assert batch is not None
    assert (await swarm.client.status()).counts == {"batched": 2}


async def test_claim_that_waits_while_the_trainer_ends_gets_no_episode_of_it(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer ends while its batch is marked as trained on disk."""
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    assert await swarm.trainer.next_batch() is not None
    marking, marked, move = asyncio.Event(), asyncio.Event(), EpisodeTable.move

    async def slowly(table: EpisodeTable, *arguments: Any, **changes: Any) -> list[EpisodeView]:
        marking.set()
        await marked.wait()
        return await move(table, *arguments, **changes)

    monkeypatch.setattr(EpisodeTable, "move", slowly)
    async with asyncio.timeout(5):
        wanted = Claim(client_id="c", task_id="b", wait_s=60)
        claim = asyncio.create_task(swarm.swarm.claim(wanted))
        stale = asyncio.create_task(swarm.swarm.next_batch(1, wait_s=60))
        await marking.wait()
        ended = asyncio.create_task(swarm.swarm.trainer_ended(EngineState.ERROR, "killed"))
        await asyncio.sleep(0)
        marked.set()
        await ended
        with pytest.raises(SwarmError, match="this trainer has ended"):
            await stale
        with pytest.raises(SwarmError, match="the engine is error: killed"):
            await claim


@pytest.mark.parametrize("saved", [True, False])
async def test_last_batch_counts_as_trained_only_if_the_last_checkpoint_includes_it(
    start_swarm: StartSwarm, saved: bool
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    producer = producer_of(swarm)
    before = producer.state()
    await producer.next_batch(0)
    producer.acknowledge(producer.state() if saved else before)

    await producer.close()
    await swarm.client.stop_engine()

    counts = (await swarm.client.status()).counts
    assert counts == ({"trained": 2} if saved else {"ended": 2})


async def test_full_groups_of_equal_rewards_are_dropped_and_free_their_quota(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE, stop_rule="tasks_with_signal", mix={"x": 1.0})
    for task in ("a", "b", "c"):
        await swarm.play(task, 0.0, source="x")
        await swarm.play(task, 0.0, source="x")
    await swarm.play("d", 0.0, source="x")
    await swarm.play("d", 1.0, source="x")
    batch = await swarm.trainer.next_batch()
    assert batch is not None
    assert {episode.task_id for group in batch.groups for episode in group} == {"d"}
    assert (await swarm.client.status()).counts == {"batched": 2, "dropped": 6}


async def test_claim_is_refused_at_once_while_the_engine_is_off(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(rolling=False)
    async with asyncio.timeout(10):
        with pytest.raises(SwarmError, match="offline"):
            await swarm.client.begin_episode()


async def test_change_of_the_wall_clock_reclaims_no_episode(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    now = time.time()
    for jump_s in (1e7, -1e7):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now + jump_s)
        await swarm.swarm.episodes.expire()
        assert await swarm.client.can_continue_episode(episode)


async def test_end_that_a_full_disk_refused_succeeds_later(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    assert await swarm.call(episode) == 200

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("agent_loop.extras.swarm.table._write_durably", full)
        with pytest.raises(SwarmError, match="No space left") as caught:
            await swarm.client.end_episode(episode, reward=1.0)
        assert caught.value.code == "unavailable"
        assert len(swarm.swarm.episodes.collected) == 0

    async def no_write(*_: object, **changes: object) -> None:
        raise SwarmError("the swarm's disk: full", "unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(EpisodeTable, "move", no_write)
        with pytest.raises(SwarmError, match="disk"):
            await swarm.client.end_episode(episode, reward=1.0)
        assert len(swarm.swarm.episodes.collected) == 0
    assert (await swarm.client.end_episode(episode, reward=1.0)).state.value == "ended"


@pytest.mark.parametrize(
    "path", ["status?since=x", "status?wait_s=nan", "episodes?limit=many", "status?wait_s=inf"]
)
async def test_error_names_a_query_parameter_that_is_not_a_number(
    start_swarm: StartSwarm, path: str
) -> None:
    swarm = await start_swarm(rolling=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with swarm.http.get(f"{swarm.url}/v1/{path}", headers=headers) as response:
        body = await response.json()
    assert response.status == 400
    assert path.split("?")[1].split("=")[0] in body["error"]["message"]


async def test_client_reports_a_server_that_is_not_a_swarm_server(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(rolling=False)
    async with AsyncSwarmClient(swarm.trainer.proxy_url, TOKEN, patience_s=0.1) as lost:
        with pytest.raises(SwarmError) as caught:
            await lost.status()
    assert caught.value.code in ("protocol", "not_found")


async def test_client_that_joins_while_episodes_are_drained_gets_an_episode(
    start_swarm: StartSwarm,
) -> None:
    """With `all_clients` its presence undoes the agreement, so that there is nothing to drain."""
    swarm = await start_swarm(stop_rule="all_clients", left_over="drop", drain_timeout_s=60)
    slow = await swarm.client.begin_episode(task_id="b", timeout_s=5)
    assert await swarm.call(slow) == 200
    await swarm.play("a", 1.0)
    await swarm.client.agree_sync_weights()
    async with asyncio.timeout(5):
        status = await swarm.client.status()
        while status.state is not EngineState.DRAINING:
            status = await swarm.swarm.status(since=status.change, wait_s=5)
    async with AsyncSwarmClient(swarm.url, TOKEN) as other:
        late = await other.begin_episode(task_id="c", timeout_s=5)
        assert await swarm.call(late) == 200
        await other.end_episode(late, reward=0.0)
        await swarm.client.end_episode(slow, reward=1.0)
        await other.agree_sync_weights()
        batch = await swarm.trainer.next_batch()
    assert batch is not None
    assert sum(map(len, batch.groups)) == 3


async def test_deadline_of_a_draining_ends_with_its_trainer(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(left_over="drop", drain_timeout_s=60, **ONE)
    await swarm.client.begin_episode(task_id="b", timeout_s=5)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    async with asyncio.timeout(5):
        status = await swarm.client.status()
        while status.state is not EngineState.DRAINING:
            status = await swarm.swarm.status(since=status.change, wait_s=5)
    await swarm.swarm.trainer_ended(EngineState.ERROR, "killed")
    swarm.trainer.sections["rollout"] = {"groups_per_step": 2, "group_size": 2}
    await swarm.client.start_engine(timeout_s=5)
    episode = await swarm.client.begin_episode(task_id="c", timeout_s=5)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 61)
    monkeypatch.setattr("agent_loop.extras.swarm.swarm.time", later)
    await swarm.swarm._look()
    assert await swarm.client.can_continue_episode(episode)


async def test_recording_that_cannot_be_removed_does_not_end_the_reclaiming_of_episodes(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(**ONE)
    first = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    second = await swarm.client.begin_episode(task_id="b", timeout_s=5)

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refused)
        swarm.expire(first)
        async with asyncio.timeout(5):
            while (status := await swarm.swarm.status()).counts.get("expired") != 1:
                await swarm.swarm.status(since=status.change, wait_s=5)
    swarm.expire(second)
    async with asyncio.timeout(5):
        while (status := await swarm.swarm.status()).counts.get("expired") != 2:
            await swarm.swarm.status(since=status.change, wait_s=5)


async def test_episode_whose_abort_a_full_disk_refused_ends_before_the_next_trainer_starts(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm(**ONE)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)

    async def full(*_: object, **__: object) -> None:
        raise SwarmError("the swarm's database: disk full", "unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(EpisodeTable, "move", full)
        await swarm.swarm.trainer_ended(EngineState.ERROR, "killed")
    await swarm.client.start_engine(timeout_s=5)
    assert not await swarm.client.can_continue_episode(episode)


async def test_claim_that_a_full_disk_refused_leaves_no_open_session(
    start_swarm: StartSwarm,
    proxy: RunningProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = await start_swarm(**ONE)

    async def refused(table: EpisodeTable, episode: Episode) -> None:
        raise SwarmError("the swarm's database: disk full", "unavailable")

    monkeypatch.setattr(EpisodeTable, "insert", refused)
    with pytest.raises(SwarmError, match="disk full"):
        await swarm.client.begin_episode(task_id="a", timeout_s=5)
    (session,) = await proxy.control.list_sessions()
    assert session["status"] == "completed"
