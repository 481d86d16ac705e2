"""Calls of a session that another process holds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest

from proxy.client import ProxyClientError, SessionHandle
from proxy.config import load_config
from proxy.serving import forwarding
from proxy.serving.forwarding import CONFIRMED_PATH, FORWARDED, own_address
from proxy.serving.retries import joins
from proxy.store import open_store
from proxy.wire.dialect import Options
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.store.test_conformance import an_intent

CHAT = "chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture
async def proxy(start_proxy: StartProxy, tmp_path: Path) -> RunningProxy:
    return await start_proxy(store=f"sqlite:///{tmp_path}/shared.sqlite")


@asynccontextmanager
async def held(session: SessionHandle, address: str, tmp_path: Path) -> AsyncIterator[None]:
    """The session is held by a process with address `address` that has a call of it in flight."""
    store = await open_store(f"sqlite:///{tmp_path}/shared.sqlite")
    await store.announce(address)
    await store.begin_turn(an_intent(session.trial_id))
    yield
    await store.close()


@asynccontextmanager
async def holder(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that responds with `answer` to any request and disconnects."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_living_holder_that_does_not_answer_gives_503_with_its_address(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    session = await proxy.session()
    async with held(session, "http://127.0.0.1:1", tmp_path):
        status, reply = await proxy.post(session, CHAT, HELLO)
    assert status == 503
    assert "http://127.0.0.1:1" in reply["error"]["message"]
    assert "peer_url" in reply["error"]["message"]
    assert not proxy.engine.calls
    assert (await proxy.post(session, CHAT, HELLO))[0] == 200


async def test_holder_that_dies_during_an_answer_breaks_the_agents_stream(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    session = await proxy.session()
    half = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/{CHAT}"
    async with (
        holder(half) as address,
        held(session, address, tmp_path),
        proxy.http.post(url, json=HELLO, headers=headers) as response,
    ):
        assert await response.content.read(5) == b"hello"
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert not proxy.engine.calls


async def test_forwarded_request_is_not_forwarded_again(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    session = await proxy.session()
    async with held(session, "http://127.0.0.1:1", tmp_path):
        status, reply = await proxy.post(session, CHAT, HELLO, **{FORWARDED: "1"})
    assert status == 421
    assert "serves this session's calls" in reply["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_answer_arrives_when_the_process_that_passes_it_on_confirms_it(
    proxy: RunningProxy, tmp_path: Path, stream: bool, is_confirmed: bool
) -> None:
    session = await proxy.session()
    body = {**HELLO, "stream": stream}
    headers = {"Authorization": f"Bearer {session.api_key}", FORWARDED: "a-number"}
    async with (  # a connection of its own, as if its process were killed at the end of the block
        aiohttp.ClientSession() as forwarder,
        forwarder.post(f"{session.base_url}/{CHAT}", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        await response.read()
        if is_confirmed:
            path = CONFIRMED_PATH.format(number="a-number")
            async with proxy.http.post(proxy.url + path, json={}) as confirmed:
                assert confirmed.status == 204
    assert await lost_turns(session, tmp_path) == (set() if is_confirmed else {0})
    assert (await proxy.post(session, CHAT, HELLO))[0] == 200
    assert len(proxy.engine.calls) == (2 if is_confirmed else 1)


async def test_request_repeated_before_a_broken_connection_is_noticed_gets_the_same_answer(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, loop = await proxy.session(), asyncio.get_running_loop()
    wait = forwarding.Arrival.wait

    async def notice_late(arrival: forwarding.Arrival) -> None:
        try:
            await wait(arrival)
        finally:
            for _ in range(100):
                await asyncio.sleep(0)

    monkeypatch.setattr(forwarding.Arrival, "wait", notice_late)
    body = orjson.dumps(HELLO)

    def request(*more: str) -> bytes:
        lines = (f"POST /{session.trial_id}/v1/{CHAT} HTTP/1.1", "Host: localhost", *more)
        lines += (f"Authorization: Bearer {session.api_key}", f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    address = (urlsplit(proxy.url).hostname, urlsplit(proxy.url).port)
    with socket.create_connection(address) as forwarder, socket.create_connection(address) as agent:
        forwarder.setblocking(False)
        agent.setblocking(False)
        await loop.sock_sendall(forwarder, request(f"{FORWARDED}: a-number"))
        answer = await loop.sock_recv(forwarder, 1 << 20)
        forwarder.close()
        agent.send(request())
        again = await loop.sock_recv(agent, 1 << 20)
    texts = [orjson.loads(each.partition(b"\r\n\r\n")[2])["choices"] for each in (answer, again)]
    assert texts[0] == texts[1]
    assert len(proxy.engine.calls) == 1


@pytest.mark.parametrize("is_awaited", [True, False])
def test_equal_request_joins_a_running_call_that_no_agent_waits_for(is_awaited: bool) -> None:
    request = SimpleNamespace(n=1, options=Options())
    asked: Any = SimpleNamespace(caller=SimpleNamespace(is_retry=False), request=request)
    assert joins(asked, asked, is_awaited=is_awaited) is not is_awaited


async def lost_turns(session: SessionHandle, tmp_path: Path) -> frozenset[int]:
    """The turns whose answer did not arrive, once this is known of all turns."""
    store = await open_store(f"sqlite:///{tmp_path}/shared.sqlite")
    try:
        async with asyncio.timeout(30):
            while (  # noqa: ASYNC110 (another process may have written it)
                undelivered := await store.undelivered(session.trial_id)
            ).pending:
                await asyncio.sleep(0.01)
    finally:
        await store.close()
    return frozenset(undelivered.lost)


async def test_unknown_number_is_not_confirmed(proxy: RunningProxy) -> None:
    path = CONFIRMED_PATH.format(number="another-number")
    async with proxy.http.post(proxy.url + path, json={}) as confirmed:
        assert confirmed.status == 404


def test_own_address_is_reachable_by_other_processes() -> None:
    def address(own_socket: str | None = None, **settings: str) -> str:
        return own_address(load_config(None, admin_key="a", **settings), 8001, own_socket)

    assert address(host="10.0.0.7") == "http://10.0.0.7:8001"
    assert address(host="::1") == "http://[::1]:8001"
    assert address(peer_url="http://gpu-0:80/") == "http://gpu-0:80"
    assert address(own_socket="/run/0.sock") == "unix:/run/0.sock"
    with socket.create_server(("0.0.0.0", 0)) as server:
        own = urlsplit(address(host="0.0.0.0"))
        socket.create_connection((own.hostname, server.getsockname()[1]), 5).close()
    assert urlsplit(address(host="::")).hostname not in (None, "::")


@asynccontextmanager
async def stopped_process() -> AsyncIterator[str]:
    """The address of a process that accepts connections and never answers (`SIGSTOP`)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_stopped_holder_is_detected_and_its_calls_get_503(
    proxy: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(forwarding, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(forwarding, "RETRY_DELAYS_S", (0.01,))
    session = await proxy.session()
    async with stopped_process() as address, held(session, address, tmp_path):
        status, reply = await proxy.post(session, CHAT, HELLO)
    assert status == 503
    assert address in reply["error"]["message"]


async def test_completing_a_session_fails_while_its_holder_is_stopped(
    proxy: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "CONFIRM_TIMEOUT_S", 0.05)
    session = await proxy.session()
    async with stopped_process() as address, held(session, address, tmp_path):
        with pytest.raises(ProxyClientError, match="did not confirm") as caught:
            await proxy.control.complete(session.trial_id)
        assert caught.value.status == 503
    await proxy.control.complete(session.trial_id)
