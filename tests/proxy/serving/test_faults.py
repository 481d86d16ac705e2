"""Faults around the proxy: huge bodies, slow readers, clock jumps, full stores, many clients."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from proxy.config import SessionsConfig
from proxy.errors import SessionError
from proxy.records import TurnStatus
from proxy.serving.sessions import Sessions
from proxy.settings.profiles import Profiles
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import StartProxy

CHAT = {"messages": [{"role": "user", "content": "Hi."}]}


async def test_concurrent_first_calls_create_one_session(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(sessions={"auto_create": True})
    url = f"{proxy.url}/new/v1/chat/completions"

    async def ask(number: int) -> int:
        body = {"messages": [{"role": "user", "content": f"Hi {number}."}]}
        async with proxy.http.post(url, json=body) as response:
            return response.status

    assert await asyncio.gather(*(ask(n) for n in range(24))) == [200] * 24
    _, turns = await proxy.control.get_turns("new")
    assert [turn.index for turn in turns] == list(range(24))


async def test_body_of_100_mb_is_refused_before_it_is_sent(start_proxy: StartProxy) -> None:
    proxy = await start_proxy()
    session = await proxy.session()
    head = (
        "POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"x-api-key: {session.api_key}\r\nContent-Length: {100 * 2**20}\r\n\r\n"
    )
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + b'{"messages": ')
    answer = await reader.readuntil(b"\r\n")
    assert b" 413 " in answer
    writer.close()
    assert (await proxy.post(session, "chat/completions", CHAT))[0] == 200


async def test_body_of_unknown_length_is_read_only_up_to_the_limit(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(limits={"body_bytes": 2**20})
    session = await proxy.session()
    sent = 0

    async def endless() -> object:
        nonlocal sent
        while sent < 100 * 2**20:
            sent += 2**16
            yield b" " * 2**16

    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    try:
        async with proxy.http.post(url, data=endless(), headers=headers) as response:
            assert response.status == 413
    except aiohttp.ClientConnectionError:
        pass  # the proxy closed the connection while the body was being sent
    assert sent < 50 * 2**20
    assert (await proxy.post(session, "chat/completions", CHAT))[0] == 200


async def test_ten_thousand_idle_sessions_stay_within_the_cache_limit(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "idle.db", max_pending_writes=20_000)
    config = SessionsConfig(cached=50)
    sessions = Sessions(store, config, Profiles({}))
    created = await asyncio.gather(*(sessions.create(f"s{n}") for n in range(10_000)))
    for session, key in created[::100]:
        live = await sessions.authorise(key, None)
        assert live.session.session_id == session.session_id
    assert len(sessions._live) <= 50
    assert len(sessions._ids_by_key) <= 4 * 50
    await store.close()


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400.0, 3600.0])
async def test_clock_jump_does_not_cut_a_session(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    proxy = await start_proxy(sessions={"ttl_s": 7200})
    session = await proxy.session()
    assert (await proxy.post(session, "chat/completions", CHAT))[0] == 200
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    more = {"messages": [{"role": "user", "content": "And now?"}]}
    assert (await proxy.post(session, "chat/completions", more))[0] == 200
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * 2
    assert all((turn.duration_s or -1) >= 0 for turn in turns)


async def test_session_expires_when_the_clock_passes_its_expiry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "clock.db")
    sessions = Sessions(store, SessionsConfig(ttl_s=10), Profiles({}))
    _, key = await sessions.create("t")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 11)
    for _ in range(2):
        with pytest.raises(SessionError) as caught:
            await sessions.authorise(key, None)
        assert caught.value.status == 410
    await store.close()


async def test_call_is_refused_before_sampling_if_the_store_is_locked(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "locked.db", busy_timeout_s=0.05)
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    asked = len(proxy.engine.calls)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    async with proxy.http.post(url, json=CHAT, headers=headers) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "server_error"
    other.execute("ROLLBACK")
    other.close()
    assert len(proxy.engine.calls) == asked
    assert (await proxy.post(session, "chat/completions", CHAT))[0] == 200
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE]
    await store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "small-disk", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs root, to mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # the proxy ends later


async def test_calls_are_refused_before_sampling_while_the_disk_is_full(
    start_proxy: StartProxy, small_disk: Path
) -> None:
    store = SqliteStore(small_disk / "proxy.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session()

    async def answered() -> bool:
        status, answer = await proxy.post(session, "chat/completions", CHAT)
        assert status == 200 or (status, answer["error"]["type"]) == (503, "server_error")
        return status == 200

    assert await answered()
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(4 << 20))
    answers = 1
    while await answered():  # in what the store's files have left
        answers += 1
        assert answers < 200
    asked = len(proxy.engine.calls)
    assert asked == answers
    assert not await answered()
    assert len(proxy.engine.calls) == asked
    filler.unlink()
    assert await answered()
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * (answers + 1)
    await store.close()


async def test_slow_reader_delays_no_other_call_and_gets_everything(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy()
    text = " ".join(f"word{n}" for n in range(3000))
    proxy.answers(text)
    slow, quick = await proxy.session(), await proxy.session()
    headers = {"Authorization": f"Bearer {slow.api_key}"}
    url = f"{slow.base_url}/chat/completions"
    body = {**CHAT, "stream": True, "max_tokens": 100_000}
    async with proxy.http.post(url, json=body, headers=headers) as response:
        assert (await proxy.post(quick, "chat/completions", CHAT))[0] == 200
        data = await response.read()
    events = [orjson.loads(e[6:]) for e in data.split(b"\n\n") if e[:7] == b"data: {"]
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert said == text
    _, turns = await proxy.record(slow)
    assert [turn.status for turn in turns] == [TurnStatus.DONE]
