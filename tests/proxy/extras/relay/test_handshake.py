"""Reasons for which the proxy refuses a worker, tested with raw messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from proxy.extras.relay import hub
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.hub import RelayHub
from proxy.extras.relay.protocol import (
    PATH,
    PROTOCOL_VERSION,
    Check,
    Fingerprint,
    Frame,
    Generate,
    Health,
    Hello,
    ProtocolError,
    Refuse,
    Welcome,
    chunk_of,
    decode_to_proxy,
    decode_to_worker,
    encode,
)
from proxy.extras.relay.section import RelayConfig
from proxy.routing.router import Router
from tests.proxy.extras.relay.conftest import TOKEN, OpenProxy, Proxy, ids_of, sample


def hello(model: Path, **changes: Any) -> Hello:
    ours = Hello(
        protocol=PROTOCOL_VERSION,
        name="gpu-0",
        incarnation="i-1",
        fingerprint=fingerprint(model),
        model="m",
        version=0,
        max_context_tokens=100,
        max_calls=8,
        calls=(),
    )
    return msgspec.structs.replace(ours, **changes)


class Socket:
    def __init__(self, proxy: Proxy, token: str = TOKEN) -> None:
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        self._url = f"http://127.0.0.1:{proxy.port}{PATH}"

    async def __aenter__(self) -> aiohttp.ClientWebSocketResponse:
        self._socket = await self._http.ws_connect(self._url)
        return self._socket

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._http.close()


async def _connect_once(proxy: Proxy, token: str = TOKEN) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        await http.ws_connect(f"http://127.0.0.1:{proxy.port}{PATH}")


async def refusal(proxy: Proxy, data: bytes) -> str:
    async with Socket(proxy) as socket:
        await socket.send_bytes(data)
        answer = decode_to_worker(await socket.receive_bytes(timeout=10))
        assert isinstance(answer, Refuse)
        assert (await socket.receive(timeout=10)).type is WSMsgType.CLOSE
    assert proxy.joined.empty()
    return answer.reason


async def test_another_protocol_version_is_refused(open_proxy: OpenProxy, model: Path) -> None:
    reason = await refusal(await open_proxy(), encode(hello(model, protocol=9)))
    assert "speaks relay protocol 9, and this proxy 2" in reason


async def test_another_architecture_is_refused(open_proxy: OpenProxy, model: Path) -> None:
    other = Fingerprint(fingerprint(model).tokenizer, "0" * 64)
    reason = await refusal(await open_proxy(), encode(hello(model, fingerprint=other)))
    assert "its architecture is 000000000000" in reason


async def test_invalid_bytes_instead_of_a_hello_are_refused(open_proxy: OpenProxy) -> None:
    assert "a message of 5 bytes" in await refusal(await open_proxy(), b"noise")
    assert "got Frame, expected a hello" in await refusal(await open_proxy(), encode(Frame(0, 0)))


async def test_worker_whose_hello_is_late_may_try_again(
    open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "HANDSHAKE_S", 0.05)
    async with Socket(await open_proxy()) as socket:
        message = await socket.receive(timeout=10)
        assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.TRY_AGAIN_LATER)


async def test_worker_beyond_the_limit_gets_503_with_retry_after(
    open_proxy: OpenProxy, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MAX_WORKERS", 1)
    proxy = await open_proxy()
    async with Socket(proxy) as socket:
        await socket.send_bytes(encode(hello(model)))
        assert isinstance(decode_to_worker(await socket.receive_bytes(timeout=10)), Welcome)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await _connect_once(proxy)
        assert refused.value.status == 503


@pytest.mark.parametrize(
    "broken",
    [
        Frame(call=0, number=5, ids=b"\0\0\0\0", logprobs=b"\0\0\0\0"),
        Frame(call=0, number=0, ids=b"\0\0\0\0", logprobs=b""),
    ],
)
async def test_worker_that_breaks_the_protocol_is_disconnected(
    open_proxy: OpenProxy, model: Path, broken: Frame
) -> None:
    proxy = await open_proxy()
    async with Socket(proxy) as socket:
        await socket.send_bytes(encode(hello(model)))
        engine = await proxy.joined.get()
        call = asyncio.create_task(ids_of(sample(engine)))
        await socket.receive_bytes(timeout=10)
        await socket.receive_bytes(timeout=10)
        await socket.send_bytes(encode(broken))
        with pytest.raises(Exception, match="broke the protocol"):
            await call
        assert await proxy.left.get() == engine.info.name


def test_frame_with_different_numbers_of_ids_and_logprobs_is_refused() -> None:
    with pytest.raises(ProtocolError, match="1 ids but 0 log-probabilities"):
        chunk_of(Frame(0, 0, ids=b"\0\0\0\0"))
    with pytest.raises(ProtocolError, match="not a whole number"):
        chunk_of(Frame(0, 0, ids=b"\0", logprobs=b"\0"))
    not_utf_8 = encode(Health(0, 0, "no")).replace(b"no", b"\xff\xff")
    with pytest.raises(ProtocolError, match=f"a message of {len(not_utf_8)} bytes"):
        decode_to_proxy(not_utf_8)
    nested = encode(Generate(0, "r", b"", {"a": None}, None, True))
    nested = nested.replace(b"\xa1a\xc0", b"\xa1a" + b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(ProtocolError, match="recursion"):
        decode_to_worker(nested)
    with pytest.raises(ProtocolError, match="a message of 1 bytes"):
        decode_to_proxy(b"\xff")


async def test_of_two_processes_that_take_over_a_name_at_once_one_becomes_the_engine(
    model: Path,
) -> None:
    router, parted = Router([]), asyncio.Event()

    async def left(name: str) -> None:
        await parted.wait()
        await router.remove(name)

    relay = RelayHub(
        RelayConfig(token=SecretStr(TOKEN)), fingerprint(model), joined=router.add, left=left
    )
    app = web.Application()
    app.router.add_get(PATH, relay.connect)
    async with TestServer(app) as server:
        assert server.runner is not None
        proxy = Proxy(server.runner, server.port or 0)
        async with Socket(proxy) as before:
            await before.send_bytes(encode(hello(model)))
            await before.receive_bytes(timeout=10)
            await before.close(code=WSCloseCode.GOING_AWAY)
        async with Socket(proxy) as one, Socket(proxy) as other:
            await one.send_bytes(encode(hello(model, incarnation="i-2")))
            await other.send_bytes(encode(hello(model, incarnation="i-3")))
            with pytest.raises(aiohttp.WSServerHandshakeError):  # after it has read the hellos
                await _connect_once(proxy, "wrong")
            parted.set()
            workers = [asyncio.create_task(until_refused(socket)) for socket in (one, other)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            assert sum(worker.done() for worker in workers) == 1
            await router.check()
            assert router.infos == [engine.info for engine in relay.engines]
            for worker in workers:
                worker.cancel()
        await relay.close()
        await router.close()


async def until_refused(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Answers the proxy's checks."""
    while not isinstance(message := decode_to_worker(await socket.receive_bytes()), Refuse):
        if isinstance(message, Check):
            await socket.send_bytes(encode(Health(message.number, 0, None)))
