"""Three proxy processes on one PostgreSQL behind nginx, while agents run."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from agent_loop.trajectory import build_segments, flatten
from proxy.client import AWAY, ProxyClient, ProxyClientError, SessionHandle
from proxy.machine.port import free_port
from proxy.records import Turn, TurnStatus
from proxy.serving.forwarding import PROBE_EVERY_S, PROBE_TIMEOUT_S
from proxy.testing.scripted_engine import ScriptedEngine
from tests.deploy.manifests import ROOT
from tests.needs import skip_or_fail
from tests.postgres_server import empty_database
from tests.proxy.checkpoint import write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "an-admin-key-of-the-tests"
REPLICAS, AGENTS, TURNS = 3, 6, 12
ANSWER = [40, 41, 42]
Result = TypeVar("Result")


class Replica:
    """One proxy process, on a port that its replacement takes over."""

    def __init__(self, number: int, folder: Path, settings: dict[str, str]) -> None:
        self.port = free_port("127.0.0.1")
        self.log = folder / f"proxy-{number}.log"
        self._settings = {**settings, "AGENTIC_PROXY_PORT": str(self.port)}
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "serve"),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | self._settings,
            )
        assert self.process.stdout is not None
        assert await asyncio.wait_for(self.process.stdout.readline(), 180), self.log.read_text()

    async def stop(self) -> int:
        """Sends SIGTERM and waits for the end of the process, as Kubernetes does."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 120)

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()


@dataclass
class Fleet:
    replicas: list[Replica]
    engine: ScriptedEngine
    control: ProxyClient
    http: aiohttp.ClientSession
    retries: int = 0

    async def agent(self, session: SessionHandle) -> None:
        """A conversation of `TURNS` turns. A call without an answer is repeated, as SDKs do."""
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"The answer is {turn}."})
            messages.append(await self._ask(session, messages))

    async def _ask(self, session: SessionHandle, messages: list[dict[str, Any]]) -> dict[str, Any]:
        for attempt in range(8):
            headers = {
                "Authorization": f"Bearer {session.api_key}",
                "x-stainless-retry-count": str(attempt),
            }
            url = f"{session.base_url}/chat/completions"
            body = {"model": "m", "messages": messages}
            try:
                async with self.http.post(url, json=body, headers=headers) as response:
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        message: dict[str, Any] = answer["choices"][0]["message"]
                        return message
                    assert response.status in (429, 500, 502, 503, 504), await response.text()
            except aiohttp.ClientConnectionError:
                pass
            self.retries += 1
            await asyncio.sleep(0.05 * 2**attempt)
        raise AssertionError("a call was never answered")

    async def ask_at(
        self, replica: Replica, session: SessionHandle, text: str, attempt: int = 0
    ) -> int:
        """The status of a call sent directly to this proxy."""
        headers = {
            "Authorization": f"Bearer {session.api_key}",
            "x-stainless-retry-count": str(attempt),
        }
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        url = f"http://127.0.0.1:{replica.port}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Repeats a control call that nginx could not pass on, as the trainer does."""
        for attempt in range(8):
            try:
                return await call()
            except ProxyClientError as error:
                if error.status not in AWAY:
                    raise
            self.retries += 1
            await asyncio.sleep(0.05 * 2**attempt)
        raise AssertionError("a control call was never answered")

    async def is_ready(self, replica: Replica) -> bool:
        async with self.http.get(f"http://127.0.0.1:{replica.port}/ready") as response:
            return response.status == 200

    async def sampling(self, calls: int) -> None:
        """Returns when the engine has had this number of calls since its calls were cleared."""
        while len(self.engine.calls) < calls:
            self.engine.called.clear()
            await self.engine.called.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    nginx = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if nginx is None:
        skip_or_fail("nginx is not installed: apt-get install nginx-light")
    tmp_path = tmp_path_factory.mktemp("fleet")
    model = write_checkpoint(tmp_path / "model")
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine(lambda _: ANSWER))
        settings = {
            "AGENTIC_PROXY_ADMIN_KEY": KEY,
            "AGENTIC_PROXY_MODEL": str(model),
            "AGENTIC_PROXY_STORE": await empty_database(postgres),
            "AGENTIC_PROXY_ENGINES": f'[{{"url": "{engine.url}"}}]',
            "AGENTIC_PROXY_PUBLIC_URL": url,
            "AGENTIC_PROXY_LIMITS__UNREADY_S": "0.2",
            "AGENTIC_PROXY_LIMITS__SHUTDOWN_S": "30",
        }
        replicas = [Replica(number, tmp_path, settings) for number in range(REPLICAS)]
        await asyncio.gather(*(replica.start() for replica in replicas))
        for replica in replicas:
            stack.push_async_callback(replica.stop)
        config = tmp_path / "nginx.conf"
        config.write_text(nginx_config(url, replicas, tmp_path))
        balancer = await asyncio.create_subprocess_exec(
            *(nginx, "-p", str(tmp_path), "-c", str(config), "-e", "stderr", "-g", "daemon off;"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(balancer.wait)
        stack.callback(balancer.terminate)
        control = await stack.enter_async_context(ProxyClient(url, KEY))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await reachable(control)
        yield Fleet(replicas, engine, control, http)


def nginx_config(url: str, replicas: list[Replica], folder: Path) -> str:
    """The repository's nginx.conf with this test's addresses; each call may reach another
    replica."""
    text = (ROOT / "docker/nginx.conf").read_text()
    for number, replica in enumerate(replicas):
        text = text.replace(f"proxy-{number}:8000", f"127.0.0.1:{replica.port}")
    text = text.replace("hash $session consistent;", "").replace("auto;", "1;")
    text = text.replace("listen 8080", f"listen {url.removeprefix('http://')}")
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {folder}/{name};" for name in paths)
    user = "user root;" if os.geteuid() == 0 else ""
    return f"{user}pid {folder}/nginx.pid;\n" + text.replace("http {", "http {" + temporary)


async def reachable(control: ProxyClient) -> None:
    """Waits until nginx accepts connections, because it does not report that."""
    for _ in range(2400):
        if await control.ready():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nginx does not listen")


def assert_one_path(turns: list[Turn]) -> None:
    """Asserts that every turn of the agent is recorded once and extends the turn before it."""
    done = [turn for turn in turns if turn.sampled]
    assert len(done) == TURNS
    for before, turn in itertools.pairwise(done):
        assert turn.parent == before.index
        assert turn.shared_tokens == before.path_tokens
    (trajectory,) = flatten(build_segments(turns))
    sampled = np.concatenate([turn.sampled_ids for turn in done])
    assert np.array_equal(trajectory.ids[trajectory.mask], sampled)


async def run_agents(fleet: Fleet, disturbance: Any) -> list[list[Turn]]:
    fleet.engine.calls.clear()
    fleet.engine.called.clear()
    fleet.retries = 0
    sessions = [await fleet.control.create_session() for _ in range(AGENTS)]
    fleet.engine.token_delay_s = 0.02
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(fleet.agent(session))
        group.create_task(disturbance)
    return [(await fleet.control.get_turns(session.trial_id))[1] for session in sessions]


async def test_any_proxy_continues_any_session(fleet: Fleet) -> None:
    records = await run_agents(fleet, asyncio.sleep(0))
    for turns in records:
        assert [turn.status for turn in turns] == [TurnStatus.DONE] * TURNS
        assert_one_path(turns)
    assert len(fleet.engine.calls) == AGENTS * TURNS
    assert fleet.retries == 0


async def test_rolling_update_with_calls_in_flight_loses_nothing(fleet: Fleet) -> None:
    async def update() -> None:
        for replica in fleet.replicas:
            assert await replica.stop() == 0, replica.log.read_text()
            await replica.start()

    records = await run_agents(fleet, update())
    for turns in records:
        assert_one_path(turns)
        assert TurnStatus.CUT not in [turn.status for turn in turns]


@pytest.mark.long
async def test_every_proxy_is_replaced_three_times_while_agents_work(fleet: Fleet) -> None:
    updated = asyncio.Event()

    async def update() -> None:
        for _ in range(3):
            for replica in fleet.replicas:
                assert await replica.stop() == 0, replica.log.read_text()
                await replica.start()
        updated.set()

    fleet.engine.calls.clear()
    fleet.engine.token_delay_s = 0.05
    records: list[list[Turn]] = []

    async def work() -> None:
        while not updated.is_set():
            session = await fleet.patiently(fleet.control.create_session)
            await fleet.agent(session)
            get_turns = partial(fleet.control.get_turns, session.trial_id)
            records.append((await fleet.patiently(get_turns))[1])

    async with asyncio.TaskGroup() as group:
        for _ in range(AGENTS * 4):
            group.create_task(work())
        group.create_task(update())
    assert len(records) >= AGENTS * 4
    for turns in records:
        assert_one_path(turns)
        assert {turn.status for turn in turns} == {TurnStatus.DONE}
    assert len(fleet.engine.calls) == len(records) * TURNS
    print(f"{len(records)} sessions, {len(fleet.engine.calls)} calls, {fleet.retries} retries")


async def test_killed_proxy_costs_its_agents_only_a_retry(fleet: Fleet) -> None:
    async def kill() -> None:
        await fleet.engine.called.wait()
        await fleet.replicas[0].kill()

    records = await run_agents(fleet, kill())
    for turns in records:
        assert_one_path(turns)
    await fleet.replicas[0].start()


async def test_parallel_calls_and_their_retries_are_each_sampled_once(fleet: Fleet) -> None:
    """One proxy serves all of these calls, whichever proxy they reach."""
    fleet.engine.calls.clear()
    fleet.engine.token_delay_s = 0.5
    session = await fleet.control.create_session()
    asked = [f"Question {number}." for number in range(4)]
    async with asyncio.TaskGroup() as group:
        for number, text in enumerate(asked):
            group.create_task(fleet.ask_at(fleet.replicas[number % REPLICAS], session, text))
        await fleet.sampling(len(asked))
        for number, text in enumerate(asked, start=1):
            group.create_task(fleet.ask_at(fleet.replicas[number % REPLICAS], session, text, 1))
    _, turns = await fleet.control.get_turns(session.trial_id)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * len(asked)
    assert len(fleet.engine.calls) == len(asked)


async def test_calls_forwarded_to_a_killed_proxy_are_served_by_the_proxy_that_received_them(
    fleet: Fleet,
) -> None:
    holder, other = fleet.replicas[:2]
    fleet.engine.calls.clear()
    session = await fleet.control.create_session()
    fleet.engine.token_delay_s = 0.5
    first = asyncio.create_task(fleet.ask_at(holder, session, "One."))
    await fleet.sampling(1)
    forwarded = asyncio.create_task(fleet.ask_at(other, session, "Two."))
    await fleet.sampling(2)
    await holder.kill()
    with pytest.raises(aiohttp.ClientConnectionError):
        await first
    fleet.engine.token_delay_s = 0.0
    assert await forwarded == 200
    assert await fleet.ask_at(other, session, "One.", 1) == 200
    _, turns = await fleet.control.get_turns(session.trial_id)
    done, cut = TurnStatus.DONE, TurnStatus.CUT
    assert [turn.status for turn in turns] == [cut, cut, done, done]
    await holder.start()


async def test_stopping_proxy_releases_its_sessions(fleet: Fleet) -> None:
    holder, other = fleet.replicas[:2]
    fleet.engine.calls.clear()
    session = await fleet.control.create_session()
    fleet.engine.token_delay_s = 1.0
    first = asyncio.create_task(fleet.ask_at(holder, session, "One."))
    await fleet.sampling(1)
    stopping = asyncio.create_task(holder.stop())
    while await fleet.is_ready(holder):
        pass
    fleet.engine.token_delay_s = 0.0
    assert await fleet.ask_at(other, session, "Two.") == 200
    assert not first.done()
    assert await first == 200
    assert await stopping == 0
    await holder.start()


async def test_session_completed_at_one_proxy_is_closed_at_all(fleet: Fleet) -> None:
    session = await fleet.control.create_session("closed")
    for _ in fleet.replicas:
        await fleet._ask(session, [{"role": "user", "content": "Hi."}])
    await fleet.control.complete(session.trial_id)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "Late."}]}
    for _ in range(REPLICAS * 2):
        url = f"{session.base_url}/chat/completions"
        async with fleet.http.post(url, json=body, headers=headers) as response:
            assert response.status == 409, await response.text()


async def test_session_of_a_stopped_proxy_gets_503_elsewhere_until_the_proxy_continues(
    fleet: Fleet,
) -> None:
    holder, other = fleet.replicas[:2]
    fleet.engine.calls.clear()
    session = await fleet.control.create_session()
    fleet.engine.token_delay_s = 0.5
    first = asyncio.create_task(fleet.ask_at(holder, session, "One."))
    await fleet.sampling(1)
    assert holder.process is not None
    async with ProxyClient(f"http://127.0.0.1:{other.port}", KEY) as control:
        holder.process.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(PROBE_EVERY_S + PROBE_TIMEOUT_S + 20):
                assert await fleet.ask_at(other, session, "Two.") == 503
            with pytest.raises(ProxyClientError, match="did not confirm") as caught:
                await control.complete(session.trial_id)
        finally:
            holder.process.send_signal(signal.SIGCONT)
            fleet.engine.token_delay_s = 0.0
        assert caught.value.status == 503
        assert await first in (200, 409)  # completing has cut it, or it was whole before
        await control.complete(session.trial_id)
    _, turns = await fleet.control.get_turns(session.trial_id)
    assert [turn.status for turn in turns] in ([TurnStatus.DONE], [TurnStatus.CUT])
