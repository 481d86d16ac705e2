"""`--workers 2`: real processes on one port give the same results, whichever is reached."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

import proxy.cli
from proxy.client import ProxyClient, SessionHandle
from proxy.records import Reward, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY

pytestmark = pytest.mark.slow


@contextmanager
def two_workers(
    checkpoint: Path, engine_url: str, folder: Path
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A proxy with two processes: its URL and the parent process."""
    argv = [sys.executable, "-m", "proxy", "serve", "--workers", "2", "--port", "0"]
    argv += ["--model", str(checkpoint), "--engine", engine_url]
    argv += ["--store", f"sqlite:///{folder}/shared.sqlite"]
    environment = {**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            assert found is not None
            yield found[0], process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) in (0, -signal.SIGKILL)


async def ask(
    session: SessionHandle, messages: list[dict[str, Any]], attempt: int = 0
) -> tuple[int, Any]:
    """Calls on a new connection, so that the kernel chooses a process again."""
    headers = {
        "Authorization": f"Bearer {session.api_key}",
        "x-stainless-retry-count": str(attempt),
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{session.base_url}/chat/completions", json={"messages": messages}, headers=headers
        ) as response,
    ):
        return response.status, orjson.loads(await response.read())


async def test_sessions_are_consistent_in_all_processes(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = [*rendering.tokenizer.encode("Done, thank you."), end]
    async with ScriptedEngine(lambda _: answer, expect_extension=True) as engine:
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control:
                session = await control.create_session()
                messages: list[dict[str, Any]] = [{"role": "user", "content": "Count."}]
                for _ in range(12):
                    status, reply = await ask(session, messages)
                    assert status == 200, reply
                    messages.append(reply["choices"][0]["message"])
                    messages.append({"role": "user", "content": "Next."})
                _, turns = await control.get_turns(session.trial_id)
                await control.complete(session.trial_id)
                refused = [(await ask(session, messages))[0] for _ in range(6)]
                await check_pause_everywhere(url)
        assert engine.violations == []
    assert [turn.parent for turn in turns] == [None, *range(11)]
    assert all(turn.status is TurnStatus.DONE for turn in turns)
    assert refused == [409] * 6


async def test_open_session_is_deleted_without_the_address_of_the_port(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--port 0` is not the configured one; the store has the processes' own sockets."""
    monkeypatch.delenv("AGENTIC_PROXY_ADMIN_KEY", raising=False)
    key = tmp_path / "admin"
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY_FILE", str(key))
    delete = ["sessions", "delete", "open", "--store", f"sqlite:///{tmp_path}/shared.sqlite"]
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    async with ScriptedEngine(lambda _: [end]) as engine:
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control:
                session = await control.create_session("open")
                messages = [{"role": "user", "content": "Count."}]
                assert (await ask(session, messages))[0] == 200
                key.write_text("another\n")
                assert await asyncio.to_thread(proxy.cli.main, delete) == 2
                assert (await ask(session, messages))[0] == 200
                key.write_text(f"{ADMIN_KEY}\n")
                assert await asyncio.to_thread(proxy.cli.main, delete) == 0
                assert [(await ask(session, messages))[0] for _ in range(6)] == [401] * 6
                assert await control.list_sessions() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_requests_on_new_connections_are_each_sampled(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, stream: bool
) -> None:
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    numbers = iter(range(100, 200))
    async with ScriptedEngine(lambda _: [next(numbers), end]) as engine:
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control:
                session = await control.create_session()
                body = {"messages": [{"role": "user", "content": "Count."}], "stream": stream}
                for _ in range(12):
                    await asyncio.to_thread(ask_and_leave, session, body)
                _, turns = await control.get_turns(session.trial_id)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * 12


def ask_and_leave(session: SessionHandle, body: dict[str, Any]) -> None:
    """Calls on a new connection, and closes it as soon as the answer is complete."""
    address, data = urlsplit(session.base_url), orjson.dumps(body)
    lines = [f"POST {address.path}/chat/completions HTTP/1.1", f"Host: {address.netloc}"]
    lines += [f"Authorization: Bearer {session.api_key}", f"Content-Length: {len(data)}"]
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        got = b""
        while not _is_whole(got):
            part = connection.recv(65536)
            assert part, got
            got += part
    assert got.startswith(b"HTTP/1.1 200")


def _is_whole(got: bytes) -> bool:
    head, _, rest = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    if length is not None:
        return len(rest) >= int(length[1])
    return b"[DONE]" in rest or rest.endswith(b"0\r\n\r\n")


async def test_concurrent_calls_and_their_retries_are_each_sampled_once(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = [[{"role": "user", "content": f"Question {number}."}] for number in range(6)]
    async with ScriptedEngine(lambda _: [end], token_delay_s=1.0) as engine:
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control, asyncio.TaskGroup() as group:
                session = await control.create_session()
                calls = [group.create_task(ask(session, messages)) for messages in asked]
                while len(engine.calls) < len(asked):
                    engine.called.clear()
                    await engine.called.wait()
                calls += [group.create_task(ask(session, messages, 1)) for messages in asked]
            async with ProxyClient(url, ADMIN_KEY) as control:
                _, turns = await control.get_turns(session.trial_id)
    assert [call.result()[0] for call in calls] == [200] * len(calls)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * len(asked)
    assert len(engine.calls) == len(asked)


async def test_metrics_and_events_include_all_processes(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with ScriptedEngine(lambda _: [end]) as engine:
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control:
                session = await control.create_session()
                heard = [asyncio.Event() for _ in range(4)]
                listening = [asyncio.create_task(events_of(control, session, e)) for e in heard]
                await control.add_reward(session.trial_id, Reward("first", 1.0))
                await asyncio.gather(*(event.wait() for event in heard))
                for number in range(12):
                    messages = [{"role": "user", "content": f"Count {number}."}]
                    assert (await ask(session, messages))[0] == 200
                counted = []
                for _ in range(6):
                    async with (
                        aiohttp.ClientSession(headers=headers) as http,
                        http.get(f"{url}/metrics") as response,
                    ):
                        text = await response.text()
                    counted.append(re.search(r'turns_total{status="done"} (\S+)', text))
                await control.complete(session.trial_id)
                seen = await asyncio.gather(*listening)
    assert [float(found[1]) for found in counted if found] == [12.0] * 6
    for events in seen:
        assert sorted(e["index"] for e in events if e["kind"] == "turn") == list(range(12))
        assert [e["kind"] for e in events].count("completed") == 1


async def events_of(
    control: ProxyClient, session: SessionHandle, heard: asyncio.Event
) -> list[dict[str, Any]]:
    """Reads events on a new connection until the session has ended."""
    events = []
    async with ProxyClient(control.base_url, control.admin_key) as own:
        async for event in own.events(session.trial_id):
            heard.set()
            events.append(event)
    return events


async def check_pause_everywhere(url: str) -> None:
    """A pause at one process pauses both."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{url}/engines/pause") as response,
    ):
        assert response.status == 200
    seen = []
    for _ in range(8):
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{url}/engines") as response,
        ):
            seen.append((await response.json())["paused"])
    assert seen == [True] * 8


@asynccontextmanager
async def session_of_two_workers(
    checkpoint: Path, rendering: Rendering, folder: Path
) -> AsyncIterator[tuple[SessionHandle, subprocess.Popen[str]]]:
    """A session of a proxy with two workers, and the process that started these."""
    answer = [rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    async with ScriptedEngine(lambda _: answer) as engine:
        with two_workers(checkpoint, engine.url, folder) as (url, parent):
            async with ProxyClient(url, ADMIN_KEY) as control:
                session = await control.create_session()
            yield session, parent


async def test_killed_worker_loses_no_session_and_killed_parent_leaves_no_worker(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    async with session_of_two_workers(checkpoint, rendering, tmp_path) as (session, parent):
        workers = children(parent.pid)
        assert len(workers) == 2
        kill(workers[0])
        messages = [{"role": "user", "content": "Hello."}]
        assert [(await ask(session, messages))[0] for _ in range(4)] == [200] * 4
        pidfds = [os.pidfd_open(pid) for pid in children(parent.pid)]
        assert pidfds
        parent.kill()
        assert all(select.select([fd], [], [], 60)[0] for fd in pidfds)


async def test_connection_waits_while_all_workers_are_dead(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    async with session_of_two_workers(checkpoint, rendering, tmp_path) as (session, parent):
        for number in range(3):
            kill_workers(parent.pid)
            asked = [[{"role": "user", "content": f"Hello {number} {n}."}] for n in range(8)]
            answers = await asyncio.gather(*(ask(session, messages) for messages in asked))
            assert [status for status, _ in answers] == [200] * 8


async def test_living_worker_accepts_the_connections_of_a_dead_one(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    """The dead one's successor is stopped in its start, and accepts its own afterwards."""
    async with session_of_two_workers(checkpoint, rendering, tmp_path) as (session, parent):
        killed, living = children(parent.pid)
        kill(killed)
        async with asyncio.timeout(60):
            while not (now := set(children(parent.pid)) - {killed, living}):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        (successor,) = now
        os.kill(successor, signal.SIGSTOP)
        asked = [[{"role": "user", "content": f"Hello {n}."}] for n in range(12)]
        async with asyncio.timeout(60):
            assert [(await ask(session, messages))[0] for messages in asked] == [200] * 12
        os.kill(successor, signal.SIGCONT)
        kill(living)
        async with asyncio.timeout(60):
            assert [(await ask(session, messages))[0] for messages in asked] == [200] * 12


async def test_killed_processes_serve_the_same_version_of_a_policy_again(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    """The workers alone, and then the whole proxy."""
    tokenizer = rendering.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def adapters_of(url: str) -> set[str]:
        async with ProxyClient(url, ADMIN_KEY) as control:
            session = await control.create_session(policies={"": "planner"})
            asked = [[{"role": "user", "content": f"Who are you? {n}"}] for n in range(4)]
            answers = [await ask(session, messages) for messages in asked]
        return {answer["choices"][0]["message"]["content"] for _, answer in answers}

    async with ScriptedEngine(lambda _: [end]) as engine:
        for version in (1, 2):
            ids = [*tokenizer.encode(f"Version {version}."), end]
            engine.adapters[f"planner@{version}.aa"] = lambda _, ids=ids: ids  # type: ignore[misc]
        with two_workers(checkpoint, engine.url, tmp_path) as (url, parent):
            async with ProxyClient(url, ADMIN_KEY) as control:
                for version in (1, 2):
                    await control.publish_policy("planner", version, f"planner@{version}.aa")
            kill_workers(parent.pid)
            assert await adapters_of(url) == {"Version 2."}
            parent.kill()
        with two_workers(checkpoint, engine.url, tmp_path) as (url, _):
            assert await adapters_of(url) == {"Version 2."}


def kill_workers(parent: int) -> None:
    """Returns when they have ended."""
    for pid in children(parent):
        kill(pid)


def kill(pid: int) -> None:
    """Returns when it has ended."""
    killed = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([killed], [], [], 60)[0]
    os.close(killed)


def children(pid: int) -> list[int]:
    """The child processes that are still running."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for thread in threads for c in (thread / "children").read_text().split()]
