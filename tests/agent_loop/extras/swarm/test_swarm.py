"""Clients, server and trainer over real HTTP; every claim opens a session at a real proxy."""

from __future__ import annotations

import asyncio
import io
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from agent_loop.extras.swarm import (
    AsyncSwarmClient,
    EngineState,
    EpisodeState,
    SwarmClient,
    SwarmError,
)
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.terminal import picture
from agent_loop.extras.swarm.wire import TrainerHello
from proxy.records.binary import decode_record
from tests.agent_loop.extras.swarm.conftest import TOKEN, RunningSwarm, StartSwarm
from tests.proxy.conftest import ADMIN_KEY
from trainer.batch import trained_batch

ONE: dict[str, Any] = {"groups": 1, "group_size": 2}


async def test_batch_holds_exactly_the_groups_of_two_tasks(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=2, group_size=2)
    played = [
        await swarm.play(task, reward)
        for task, reward in (("a", 1.0), ("b", 0.0), ("a", 0.0), ("b", 1.0))
    ]

    batch = await swarm.trainer.next_batch()

    assert batch is not None
    assert [[(e.task_id, e.reward) for e in group] for group in batch.groups] == [
        [("a", 1.0), ("a", 0.0)],
        [("b", 0.0), ("b", 1.0)],
    ]
    assert (await swarm.client.status()).state is EngineState.SYNCING
    for episode in played:
        record = swarm.table.record_file(episode.episode_id)
        session, turns = decode_record(record.read_bytes())
        assert session.session_id == episode.episode_id
        assert [len(turn.sampled_ids) > 0 for turn in turns] == [True]


async def test_trainers_next_request_marks_the_last_batch_as_trained(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    await swarm.trainer.next_batch()
    assert (await swarm.client.status()).counts == {"batched": 2}

    assert await swarm.trainer.next_batch(wait_s=0) is None

    status = await swarm.client.status()
    assert (status.state, status.counts, status.version) == (EngineState.ROLLING, {"trained": 2}, 1)
    assert list(swarm.table.record_file("x").parent.iterdir()) == []


async def test_each_claim_has_its_own_id_key_and_session(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    episodes = [await swarm.client.begin_episode(timeout_s=5) for _ in range(3)]
    for attribute in ("episode_id", "key", "api_key", "base_url"):
        assert len({getattr(episode, attribute) for episode in episodes}) == 3
    assert await swarm.call(episodes[0]) == 200
    assert await swarm.call(episodes[0], key=episodes[1].api_key) in (401, 403, 404)


async def test_episode_of_a_vanished_client_is_reclaimed_and_its_session_closed(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(groups=8, max_open=1)
    async with AsyncSwarmClient(swarm.url, TOKEN) as gone:
        episode = await gone.begin_episode(lease_s=2.0, timeout_s=5)
        assert await swarm.call(episode) == 200
    # `gone` sends no more heartbeats: its slot is free within its lease.
    again = await swarm.client.begin_episode(timeout_s=20)
    assert again.episode_id != episode.episode_id
    assert await swarm.call(episode) in (401, 409, 410)
    with pytest.raises(SwarmError) as caught:
        await swarm.client.end_episode(episode, task_id="a", reward=1.0)
    assert caught.value.code == "late"
    assert not await swarm.client.can_continue_episode(episode)
    assert (await swarm.client.status()).counts["expired"] == 1


async def test_heartbeats_keep_a_slow_episode_open(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(lease_s=1.5, timeout_s=5)
    expired = asyncio.create_task(_until_gone(swarm, episode.episode_id))
    done, _ = await asyncio.wait([expired], timeout=2.5)
    assert not done
    assert await swarm.client.can_continue_episode(episode)
    expired.cancel()


async def test_episode_is_reclaimed_after_its_lifetime_despite_heartbeats(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(groups=8, max_life_s=0.4)
    episode = await swarm.client.begin_episode(lease_s=0.3, timeout_s=5)
    await asyncio.wait_for(_until_gone(swarm, episode.episode_id), 5)
    assert not await swarm.client.can_continue_episode(episode)


async def _until_gone(swarm: RunningSwarm, episode_id: str) -> None:
    async for _ in swarm.client.changes():
        buffer = await swarm.client.get_episode_buffer()
        if episode_id not in {episode.episode_id for episode in buffer}:
            return


async def test_repeating_an_end_changes_nothing_and_a_different_end_is_refused(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.play("a", 1.0)
    assert (await swarm.client.end_episode(episode, reward=1.0)).reward == 1.0
    with pytest.raises(SwarmError) as caught:
        await swarm.client.end_episode(episode, reward=0.0)
    assert caught.value.code == "conflict"
    assert (await swarm.client.status()).collected == 1


async def test_only_the_claimant_can_end_an_episode(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    await swarm.call(episode)
    forged = episode.model_copy(update={"key": "not-the-key"})
    for attempt in (
        swarm.client.end_episode(forged, reward=1.0),
        swarm.client.abort_episode(forged),
        swarm.client.can_continue_episode(forged),
    ):
        with pytest.raises(SwarmError) as caught:
            await attempt
        assert caught.value.code == "not_yours"
    assert (await swarm.client.end_episode(episode, reward=0.0)).reward == 0.0


async def test_every_route_needs_the_token(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm()
    routes = [
        ("GET", "/v1/status"),
        ("GET", "/v1/events"),
        ("GET", "/metrics"),
        ("GET", "/v1/tasks"),
        ("GET", "/v1/config"),
        ("PUT", "/v1/config"),
        ("POST", "/v1/start"),
        ("POST", "/v1/stop"),
        ("POST", "/v1/agree"),
        ("POST", "/v1/episodes"),
        ("GET", "/v1/episodes"),
        ("POST", "/v1/episodes/e/end"),
        ("POST", "/v1/episodes/e/abort"),
        ("POST", "/v1/episodes/e/heartbeat"),
        ("POST", "/trainer/hello"),
        ("POST", "/trainer/next_batch"),
        ("GET", "/trainer/records/e"),
    ]
    for method, path in routes:
        for token in ("", "wrong", *([TOKEN] if path.startswith("/trainer") else [])):
            headers = {"Authorization": f"Bearer {token}"}
            async with swarm.http.request(method, swarm.url + path, headers=headers) as response:
                assert response.status == 401, path


async def test_end_needs_a_finite_reward_and_an_answered_model_call(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    with pytest.raises(SwarmError, match="no answered model call"):
        await swarm.client.end_episode(episode, reward=1.0)
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Episode-Key": episode.key}
    url = f"{swarm.url}/v1/episodes/{episode.episode_id}/end"
    data = '{"task_id": "a", "reward": NaN}'
    headers["Content-Type"] = "application/json"
    async with swarm.http.post(url, data=data, headers=headers) as response:
        assert response.status == 400


async def test_acknowledged_episodes_survive_a_restart_and_are_trained_once(
    start_swarm: StartSwarm,
) -> None:
    first = await start_swarm(**ONE)
    kept = await first.play("a", 1.0)
    await first.play("a", 0.0)
    assert await first.trainer.next_batch() is not None  # handed over and never trained

    second = await start_swarm(**ONE)

    batch = await second.trainer.next_batch()
    assert batch is not None
    assert batch.groups[0][0].episode_id == kept.episode_id
    assert batch.number == 2
    assert await second.trainer.next_batch(wait_s=0) is None
    assert (await second.client.status()).counts == {"trained": 2}


async def test_end_of_the_trainer_is_noticed_at_once_and_loses_no_result(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    open_ = await swarm.client.begin_episode(task_id="a", timeout_s=5)
    seen = asyncio.create_task(_until(swarm, EngineState.ERROR))

    await swarm.swarm.trainer_ended(EngineState.ERROR, "exit code -9: out of memory")

    status = await asyncio.wait_for(seen, 5)
    assert "out of memory" in status.detail
    assert not await swarm.client.can_continue_episode(open_)
    with pytest.raises(SwarmError, match="error"):
        await swarm.client.begin_episode(timeout_s=0.1)
    await swarm.client.start_engine(timeout_s=5)
    await swarm.play("a", 0.0)
    assert await swarm.trainer.next_batch() is not None


async def _until(swarm: RunningSwarm, state: EngineState) -> Any:
    async for status in swarm.client.changes():
        if status.state is state:
            return status


@pytest.mark.parametrize("left_over", ["carry", "drop", "train"])
async def test_left_over_episodes_are_carried_dropped_or_trained(
    start_swarm: StartSwarm, left_over: str
) -> None:
    swarm = await start_swarm(groups=1, group_size=2, left_over=left_over)
    await swarm.play("b", 1.0)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    batch = await swarm.trainer.next_batch()
    assert batch is not None
    tasks = {group[0].task_id: len(group) for group in batch.groups}
    status = await swarm.client.status()
    assert tasks == ({"a": 2, "b": 1} if left_over == "train" else {"a": 2})
    assert status.collected == (1 if left_over == "carry" else 0)
    assert status.counts.get("dropped", 0) == (1 if left_over == "drop" else 0)


async def test_draining_waits_for_open_episodes_and_then_aborts_them(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(left_over="drop", drain_timeout_s=0.5, **ONE)
    slow = await swarm.client.begin_episode(task_id="b", timeout_s=5)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    await asyncio.wait_for(_until(swarm, EngineState.DRAINING), 5)
    with pytest.raises(SwarmError):
        await swarm.client.begin_episode(timeout_s=0.0)
    assert await swarm.call(slow) == 200  # it may still end
    assert await swarm.trainer.next_batch() is not None
    assert not await swarm.client.can_continue_episode(slow)


async def test_with_carry_an_open_episode_continues_across_the_update(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE)
    slow = await swarm.client.begin_episode(task_id="b", timeout_s=5)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)
    assert await swarm.trainer.next_batch() is not None
    assert await swarm.call(slow) == 200
    assert (await swarm.client.end_episode(slow, reward=1.0)).state is EpisodeState.ENDED


async def test_evaluation_episodes_are_never_in_a_batch(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0, kind="eval")
    await swarm.play("a", 0.0, kind="eval")
    assert await swarm.trainer.next_batch(wait_s=0) is None
    assert (await swarm.client.status()).counts == {"evaluated": 2}


async def test_batch_is_made_when_all_clients_ask_for_an_update(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(stop_rule="all_clients")
    async with AsyncSwarmClient(swarm.url, TOKEN) as other:
        episode = await other.begin_episode(task_id="b", timeout_s=5)
        await swarm.call(episode)
        await other.end_episode(episode, reward=0.0)
        await swarm.play("a", 1.0)
        await swarm.client.agree_sync_weights()
        assert await swarm.trainer.next_batch(wait_s=0) is None
        await other.agree_sync_weights()
        batch = await swarm.trainer.next_batch()
    assert batch is not None
    assert [group[0].task_id for group in batch.groups] == ["b", "a"]


async def test_two_hundred_clients_share_one_server(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=50, group_size=4, max_open=40)

    async def one(number: int) -> None:
        async with AsyncSwarmClient(swarm.url, TOKEN, f"client-{number}") as client:
            episode = await client.begin_episode(task_id=f"t{number % 50}", timeout_s=60)
            assert await swarm.call(episode) == 200
            await client.end_episode(episode, reward=float(number % 2))

    await asyncio.gather(*(one(number) for number in range(200)))
    batch = await swarm.trainer.next_batch()
    assert batch is not None
    assert [len(group) for group in batch.groups] == [4] * 50
    assert len({e.client_id for group in batch.groups for e in group}) == 200


async def test_threads_can_share_the_synchronous_client(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=2, group_size=2)

    def play(client: SwarmClient, task: str, reward: float) -> None:
        with client.episode(task_id=task, timeout_s=20) as episode:
            request = urllib.request.Request(
                f"{episode.base_url}/chat/completions",
                b'{"model": "m", "messages": [{"role": "user", "content": "Hi."}]}',
                {"Authorization": f"Bearer {episode.api_key}"},
            )
            urllib.request.urlopen(request).read()
            client.end_episode(episode, reward=reward)

    def all_of_them() -> None:
        with SwarmClient(swarm.url, TOKEN) as client, ThreadPoolExecutor(4) as threads:
            plays = [
                threads.submit(play, client, task, reward)
                for task, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 0.0))
            ]
            for each in plays:
                each.result()

    await asyncio.to_thread(all_of_them)
    assert await swarm.trainer.next_batch() is not None


async def test_error_in_the_block_aborts_the_episode(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    with pytest.raises(RuntimeError):
        async with swarm.client.episode(task_id="a", timeout_s=5):
            raise RuntimeError("the agent broke")
    status = await swarm.client.status()
    assert (status.open_episodes, status.counts) == (0, {"aborted": 1})


async def test_configuration_is_accepted_only_while_the_engine_is_off(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(rolling=False)
    with pytest.raises(SwarmError, match="no configuration"):
        await swarm.client.start_engine(timeout_s=5)
    await swarm.client.sync_train_config("model: {path: m}")
    await swarm.client.start_engine(timeout_s=5)
    with pytest.raises(SwarmError, match="stop it first"):
        await swarm.client.sync_train_config("model: {path: n}")


async def test_every_change_is_an_event(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    timeout = aiohttp.ClientTimeout(total=10)
    async with swarm.http.get(
        f"{swarm.url}/v1/events", headers=headers, timeout=timeout
    ) as response:
        await response.content.readuntil(b"\n\n")
        await swarm.client.begin_episode(timeout_s=5)
        event = await response.content.readuntil(b"\n\n")
    assert b'"open_episodes":1' in event


async def test_producer_builds_rollouts_from_the_recordings(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(rolling=False, **ONE)
    hello = TrainerHello(
        proxy_url=swarm.trainer.proxy_url, proxy_admin_key=ADMIN_KEY, **swarm.trainer.sections
    )
    producer = SwarmProducer(swarm.url, swarm.trainer.key, hello)
    swarm.swarm.set_state(EngineState.BOOTING)
    batch = asyncio.create_task(producer.next_batch(0))
    await asyncio.wait_for(_until(swarm, EngineState.ROLLING), 5)
    await swarm.play("a", 1.0)
    await swarm.play("a", 0.0)

    (group,) = await batch

    await producer.close()
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert all(rollout.trainable for rollout in group.rollouts)
    assert all(rollout.sampled_tokens > 0 for rollout in group.rollouts)
    assert group.task.task_id == "a"


async def test_terminal_view_shows_engine_and_episodes(start_swarm: StartSwarm) -> None:
    swarm = await start_swarm(groups=8)
    episode = await swarm.play("sum-17", 0.5)
    status = await swarm.client.status()
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(picture(status, await swarm.client.get_episode_buffer(), now=0.0))
    shown = console.export_text()
    assert "rolling  version 0" in shown
    assert episode.episode_id in shown
    assert "sum-17" in shown


async def test_start_resumes_the_run_unless_the_configuration_changed(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(rolling=False)
    for config in ("a: 1", "a: 1", "a: 2"):
        await swarm.client.auto_start(config)
        await swarm.client.stop_engine()
    await swarm.client.auto_start("a: 2")
    await swarm.client.auto_start("a: 2", force_restart=True)
    assert swarm.trainer.run_dirs == ["", "runs/scripted", "", "runs/scripted", ""]


async def test_versions_of_an_earlier_trainer_count_as_older(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(**ONE)
    await swarm.play("a", 1.0)
    await swarm.client.stop_engine()
    await swarm.client.start_engine(timeout_s=5)
    await swarm.play("a", 0.0)
    hello = TrainerHello(
        proxy_url=swarm.trainer.proxy_url, proxy_admin_key=ADMIN_KEY, **swarm.trainer.sections
    )
    producer = SwarmProducer(swarm.url, swarm.trainer.key, hello)

    (group,) = await producer.next_batch(0)

    await producer.close()
    old, new = group.rollouts
    assert old.trainable
    assert old.oldest_version == -2  # -1 is of no version
    assert new.oldest_version == 0
    assert trained_batch([group]).num_rollouts == 2


async def test_two_clients_can_start_the_engine_at_the_same_time(
    start_swarm: StartSwarm,
) -> None:
    swarm = await start_swarm(rolling=False)
    async with AsyncSwarmClient(swarm.url, TOKEN) as other:
        both = await asyncio.gather(swarm.client.auto_start("a: 1"), other.auto_start("a: 1"))
    assert [status.state for status in both] == [EngineState.ROLLING] * 2
    assert len(swarm.trainer.run_dirs) == 1
