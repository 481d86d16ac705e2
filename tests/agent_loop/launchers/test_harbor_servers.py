"""Trials on several harbor-servers, whose trials are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError
from agent_loop.extras.harbor import servers as harbor_servers
from agent_loop.extras.harbor.launcher import HarborConfig, HarborLauncher
from agent_loop.extras.harbor.servers import HarborServers
from agent_loop.records import AgentEnd, Trial
from harbor_sdk import AgentRunRequest, AgentSpec, client
from proxy.errors import ConfigurationError
from proxy.machine.port import free_port
from tests.agent_loop.conftest import MakeTrial
from tests.harbor_sdk.harbor_tasks import write_task
from tests.harbor_sdk.scripted_server import ScriptedTrials, serving

Trials = Callable[[str], Trial]


@pytest.fixture
def trial(tmp_path: Path, make_trial: MakeTrial) -> Trials:
    """`trial(id)`: a trial with a directory and a task folder."""
    first = make_trial(local_task_path=str(write_task(tmp_path / "tasks", "one")))

    def make(trial_id: str) -> Trial:
        directory = tmp_path / trial_id
        directory.mkdir()
        return replace(first, trial_id=trial_id, directory=directory)

    return make


@asynccontextmanager
async def two_servers(
    tmp_path: Path, servers: list[ScriptedTrials], **settings: object
) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(serving(tmp_path / str(n), trials, **settings))
            for n, trials in enumerate(servers)
        ]


def launcher_on(urls: list[str], **settings: object) -> HarborLauncher:
    given = {"agent_name": "waits", "server_url": urls, **settings}
    return HarborLauncher(HarborConfig.model_validate(given))


async def begun(servers: list[ScriptedTrials], number: int) -> None:
    """Returns when this number of trials has begun in all."""
    async with asyncio.timeout(30):
        while sum(len(trials.started) for trials in servers) < number:
            for trials in servers:
                trials.began.clear()
            waits = [asyncio.create_task(trials.began.wait()) for trials in servers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()


async def test_trial_goes_to_the_server_with_the_fewest_trials(
    tmp_path: Path, trial: Trials
) -> None:
    servers = [ScriptedTrials(), ScriptedTrials()]
    async with two_servers(tmp_path, servers) as urls:
        launcher = launcher_on(urls)
        running = [asyncio.create_task(launcher.run(trial(f"t{n}"))) for n in range(4)]
        await begun(servers, 4)
        assert [len(trials.started) for trials in servers] == [2, 2]
        for trials in servers:
            trials.gate.set()
        assert {result.end for result in await asyncio.gather(*running)} == {AgentEnd.EXITED}
        await launcher.close()


async def test_further_trials_wait_for_a_server_with_room(tmp_path: Path, trial: Trials) -> None:
    servers = [ScriptedTrials(), ScriptedTrials()]
    async with two_servers(tmp_path, servers) as urls:
        launcher = launcher_on(urls, server_trials=1)
        running = [asyncio.create_task(launcher.run(trial(f"t{n}"))) for n in range(5)]
        await begun(servers, 2)
        servers[1].gate.set()
        await begun(servers, 5)
        servers[0].gate.set()
        await asyncio.gather(*running)
        assert [len(trials.started) for trials in servers] == [1, 4]
        assert [trials.most_at_once for trials in servers] == [1, 1]
        await launcher.close()


async def test_trial_waits_for_room_for_a_bounded_time() -> None:
    servers = HarborServers(["http://127.0.0.1:1"], trials_each=1, wait_s=0.1)
    async with servers.place():
        with pytest.raises(LaunchError, match=r"no room at 1 servers.*raise server_trials"):
            await servers.place().__aenter__()
    await servers.close()


async def test_waiting_trial_goes_to_a_server_that_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harbor_servers, "AWAY_S", 0.3)
    async with two_servers(tmp_path, [ScriptedTrials(), ScriptedTrials()]) as urls:
        servers = HarborServers(urls, trials_each=1, wait_s=10)
        async with servers.place(), servers.place() as full:
            pass
        full.avoid()
        async with servers.place() as other, servers.place() as waited_for:
            assert (other.url, waited_for.url) == (urls[1 - urls.index(full.url)], full.url)
        await servers.close()


async def test_server_that_does_not_answer_gets_no_trial(tmp_path: Path, trial: Trials) -> None:
    trials = ScriptedTrials()
    gone = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    async with serving(tmp_path, trials) as url:
        launcher = launcher_on([gone, url], agent_name="terminus-2")
        for name in ("t0", "t1"):
            await launcher.run(trial(name))
        assert len(trials.started) == 2
        await launcher.close()


async def test_trial_of_a_lost_server_fails_and_the_next_one_goes_to_another(
    tmp_path: Path, trial: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    monkeypatch.setattr(client, "LONG_POLL_S", 0.5)  # a server that ends waits for the poll's end
    lost, present = ScriptedTrials(), ScriptedTrials()
    async with AsyncExitStack() as first, serving(tmp_path / "present", present) as url:
        other = await first.enter_async_context(serving(tmp_path / "lost", lost))
        launcher = launcher_on([other, url])
        running = asyncio.create_task(launcher.run(trial("t0")))
        await begun([lost], 1)
        await first.aclose()
        with pytest.raises(LaunchError, match="harbor:"):
            await running
        present.gate.set()
        await launcher.run(trial("t1"))
        assert len(present.started) == 1
        await launcher.close()


async def test_trial_that_a_full_queue_refused_goes_to_another_server(
    tmp_path: Path, trial: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 1)
    full, free = ScriptedTrials(), ScriptedTrials()
    limits = {"concurrency": 1, "max_queued": 1}
    async with two_servers(tmp_path, [full, free], **limits) as urls:
        request = AgentRunRequest(agent=AgentSpec(name="waits"), task_name="org/task")
        async with client.AgentRunClient(urls[0]) as others:
            await others.submit(request)
            await begun([full], 1)
            await others.submit(request)  # waits in the queue
        free.gate.set()
        launcher = launcher_on(urls)
        await launcher.run(trial("t0"))
        assert (len(full.requests), len(free.requests)) == (1, 1)
        await launcher.close()


async def test_trial_fails_with_all_addresses_if_no_server_answers(trial: Trials) -> None:
    urls = [f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
    launcher = launcher_on(urls)
    with pytest.raises(LaunchError, match=f"none of 2 servers answers: {urls[0]}, {urls[1]}"):
        await launcher.run(trial("t0"))
    await launcher.close()


def test_servers_and_a_local_trial_are_refused_together() -> None:
    both = {"agent_name": "oracle", "server_url": ["http://a", "http://b"], "use_local_trial": True}
    config = HarborConfig.model_validate(both)
    with pytest.raises(ConfigurationError, match=r"server_url=\('http://a', 'http://b'\)"):
        HarborLauncher(config)
