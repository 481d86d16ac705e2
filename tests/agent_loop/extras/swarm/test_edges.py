"""What clients send by mistake, and what stands between them and the server."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_loop.extras.swarm import AsyncSwarmClient, SwarmError
from agent_loop.extras.swarm.joint import outcome
from agent_loop.extras.swarm.server import SwarmServer
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import Claim, Decider, EpisodeState
from proxy.http.server import app_runner
from proxy.http.web_guard import Hosts
from proxy.machine.port import free_port
from tests.agent_loop.extras.swarm.conftest import TOKEN, ScriptedTrainer, StartSwarm
from tests.proxy.conftest import RunningProxy


@pytest.mark.parametrize("reward", [-sys.float_info.max, 1e10])
async def test_reward_that_would_not_be_trained_is_refused_and_can_be_given_again(
    reward: float, start_swarm: StartSwarm
) -> None:
    swarm = await start_swarm()
    episode = await swarm.client.begin_episode(task_id="t")
    await swarm.call(episode)
    for given in ({"reward": reward}, {"reward": 1.0, "turn_rewards": {0: reward}}):
        with pytest.raises(SwarmError, match="reward") as refused:
            await swarm.client.end_episode(episode, **given)
        assert refused.value.code == "invalid"
    assert (await swarm.client.end_episode(episode, reward=-1e9)).reward == -1e9


@pytest.mark.parametrize(
    "metadata", [{"score": np.float32(0.5)}, {"n": 2**70}, {"p": np.array([1.0])}]
)
async def test_metadata_that_json_cannot_hold_is_invalid_and_the_episode_still_held(
    metadata: dict[str, Any], start_swarm: StartSwarm
) -> None:
    swarm = await start_swarm()
    episode = await swarm.client.begin_episode(task_id="t")
    await swarm.call(episode)
    with pytest.raises(SwarmError) as refused:
        await swarm.client.end_episode(episode, reward=1.0, metadata=metadata)
    assert refused.value.code == "invalid"
    assert swarm.client.holds(episode)
    reason = "agent said: " + b"\xff".decode(errors="surrogateescape")
    view = await swarm.client.abort_episode(episode, reason)
    assert (view.state, view.reason) == (EpisodeState.ABORTED, "agent said: ?")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_same_configuration_resumes_the_run(end: str, start_swarm: StartSwarm) -> None:
    swarm = await start_swarm()
    text = f"model: {{path: m}}{end}trainer: {{steps: 3}}{end}"
    for _ in range(3):
        await swarm.client.stop_engine()
        await swarm.client.auto_start(text)
    assert swarm.trainer.run_dirs[-2:] == ["runs/scripted"] * 2


async def test_404_of_what_is_before_the_deciding_server_decides_nothing() -> None:
    answers = iter(
        [
            web.Response(status=404, text="404 page not found"),
            web.json_response({"error": "no route"}, status=404),
            web.json_response({"error": {"code": "not_found", "message": "no"}}, status=404),
        ]
    )

    async def answer(_: web.Request) -> web.Response:
        return next(answers)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        decider = Decider(url=str(server.make_url("")), episode_id="e", key="k")
        found = [await outcome(decider) for _ in range(3)]
    assert found == [None, None, EpisodeState.ABORTED]


async def test_claim_waits_for_a_server_that_is_not_there_yet() -> None:
    seen = list[str]()
    port = free_port("127.0.0.1")

    async def claim(request: web.Request) -> web.Response:
        seen.append(request.path)
        error = {"code": "state", "message": "the engine is offline"}
        return web.json_response({"error": error}, status=409)

    app = web.Application()
    app.router.add_post("/v1/stop", claim)
    runner = app_runner(app)
    await runner.setup()
    async with AsyncSwarmClient(f"http://127.0.0.1:{port}", "t", patience_s=60.0) as client:
        stopping = asyncio.create_task(client.stop_engine())
        refused = asyncio.create_task(client.begin_episode(timeout_s=0.2))
        with pytest.raises(SwarmError) as error:
            await refused
        assert error.value.code == "unreachable"
        assert not stopping.done()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with pytest.raises(SwarmError, match="offline"):
            await stopping
    assert seen == ["/v1/stop"], "it arrived, and is not repeated"
    await runner.cleanup()


async def test_claims_that_are_refused_at_once_are_not_repeated_at_once(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.extras.swarm.admission.MAX_WAITING", 0)
    swarm = await start_swarm(max_open=1)
    await swarm.client.begin_episode()
    pauses = list[float]()
    pause = asyncio.sleep

    async def counted(seconds: float) -> None:
        if seconds > 1.0:  # until a heartbeat
            await pause(seconds)
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError
        await pause(0)

    monkeypatch.setattr(asyncio, "sleep", counted)
    with pytest.raises(asyncio.CancelledError):
        await swarm.client.begin_episode()
    assert pauses == [1.0] * 3


async def test_episode_of_a_client_that_has_gone_while_it_waited_is_given_back(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    """As `serve` runs it: aiohttp's TestServer would cancel the handler of a client that goes."""
    table = EpisodeTable(tmp_path)
    swarm = Swarm(table)
    trainer = ScriptedTrainer(swarm, proxy.url)
    trainer.sections = {"swarm": {"max_open": 1}, "rollout": {"groups_per_step": 8}}
    hosts = Hosts("127.0.0.1")
    server = SwarmServer(swarm, trainer, table, TOKEN, tmp_path / "trainer.yaml", hosts)
    runner = app_runner(server.build_app(), shutdown_timeout=2.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    trainer.server_url, trainer.key = url, server.trainer_key
    async with AsyncSwarmClient(url, TOKEN) as client:
        await client.auto_start("model: {path: m}")
        held = await client.begin_episode(task_id="t")
        async with AsyncSwarmClient(url, TOKEN, client_id="gone") as gone:
            waits = asyncio.create_task(gone.begin_episode(task_id="t"))
            async for _ in client.changes():
                if swarm.episodes.admission.waiting:
                    break
                swarm.set_state(swarm.state)  # a change, so that it is looked at again
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        await client.abort_episode(held)
        await client.begin_episode(task_id="t", timeout_s=20)
        states = {view.client_id: view.state for view in swarm.buffer(9)}
        assert states.get("gone", EpisodeState.ABORTED) is EpisodeState.ABORTED
    await runner.cleanup()


async def test_lease_begins_when_the_claimant_gets_the_episode(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = await start_swarm()
    clock = [0.0]
    real = swarm.swarm.episodes._sessions.open

    async def slow(view: Any) -> Any:
        clock[0] += 50.0
        return await real(view)

    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + clock[0])
    monkeypatch.setattr(swarm.swarm.episodes._sessions, "open", slow)
    episode = await swarm.client.begin_episode(task_id="t", lease_s=60.0)
    left = swarm.swarm.episodes._open[episode.episode_id].lease_until - time.monotonic()
    assert 50.0 < left <= 60.0


async def test_episode_of_a_claim_that_is_cancelled_as_it_is_served_is_gone(
    start_swarm: StartSwarm,
) -> None:
    """Before, it stayed among the open ones: its lease ran out later, and its place was given away
    twice."""
    swarm = await start_swarm(max_open=1)
    episodes = swarm.swarm.episodes
    held = await swarm.client.begin_episode(task_id="t")
    claim = asyncio.create_task(swarm.swarm.claim(Claim(client_id="c", task_id="t", wait_s=60)))
    while not episodes.admission.waiting:  # noqa: ASYNC110 (the task has only to run)
        await asyncio.sleep(0)
    serve = episodes.admission.look_at_freed

    def and_cancel(views: Any) -> None:
        serve(views)
        claim.cancel()

    episodes.admission.look_at_freed = and_cancel  # type: ignore[method-assign]
    await swarm.client.abort_episode(held)
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert len(episodes) == 0
    assert episodes.admission.claimed_training == 0
    last = await swarm.client.begin_episode(task_id="t", timeout_s=20)
    assert [view.episode_id for view in episodes] == [last.episode_id]
