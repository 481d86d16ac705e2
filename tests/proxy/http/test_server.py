"""Bodies that are compressed, truncated, too large, or do not match their headers."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
import pytest
from aiohttp import web

from proxy.http.server import app_runner, read_in_time, until_sent
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

BODY = orjson.dumps({"messages": [{"role": "user", "content": "Hello."}]})
BODY_BYTES = 100_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def post(
    proxy: RunningProxy, path: str, key: str, encoding: str, body: bytes
) -> tuple[int, str]:
    headers = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Content-Encoding": encoding,
    }
    # A `Payload` keeps aiohttp's client from compressing the body a second time.
    async with proxy.http.post(
        proxy.url + path, data=_chunks(body), headers=headers, chunked=True
    ) as response:
        return response.status, await response.text()


async def _chunks(body: bytes):
    yield body


def packed(body: bytes) -> bytes:
    """Without the time, because the bodies are in the tests' names, which xdist compares."""
    return gzip.compress(body, mtime=0)


RAW_DEFLATE = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("gzip", packed(BODY), 200, "choices"),
        ("x-gzip", packed(BODY), 200, "choices"),
        ("deflate", zlib.compress(BODY), 200, "choices"),
        ("deflate", RAW_DEFLATE.compress(BODY) + RAW_DEFLATE.flush(), 200, "choices"),
        ("identity", BODY, 200, "choices"),
        ("gzip", BODY, 400, "not gzip"),
        ("deflate", b"\x07\xff\xff", 400, "not deflate"),
        ("gzip", packed(BODY)[:-5], 400, "cut off"),
        ("gzip", packed(BODY) + b"more", 400, "after its end"),
        ("br", BODY, 415, "'br' is not supported"),
        ("gzip, gzip", packed(packed(BODY)), 415, "not supported"),
        ("gzip", packed(b" " * 20_000_000), 413, f"{BODY_BYTES} bytes (limits.body_bytes)"),
        ("identity", b" " * (BODY_BYTES + 1), 413, f"{BODY_BYTES} bytes (limits.body_bytes)"),
    ],
)
@pytest.mark.parametrize("dialect", ["chat/completions", "messages"])
async def test_compressed_body_is_decompressed_up_to_the_limit(
    start_proxy: StartProxy, dialect: str, encoding: str, body: bytes, status: int, said: str
) -> None:
    proxy = await start_proxy(limits={"body_bytes": BODY_BYTES})
    session = await proxy.session()
    if dialect == "messages" and status == 200:
        said = '"type":"message"'
    got, answer = await post(proxy, f"/v1/{dialect}", session.api_key, encoding, body)
    assert (got, said in answer) == (status, True), answer


@pytest.mark.parametrize("path", ["/sessions", "/engines", "/sessions/x/rewards"])
async def test_control_calls_refuse_a_body_that_does_not_match_its_encoding(
    proxy: RunningProxy, path: str
) -> None:
    await proxy.control.create_session("x")
    got, answer = await post(proxy, path, ADMIN_KEY, "gzip", BODY)
    assert (got, "not gzip" in answer) == (400, True), answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    ],
    ids=["tls", "nul", "length", "long header"],
)
async def test_malformed_request_gets_400_without_a_log_entry(
    proxy: RunningProxy, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(proxy.url.rpartition(":")[2])
    with caplog.at_level(logging.INFO):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
    assert answer.split()[1] == b"400"
    assert not [record for record in caplog.records if record.exc_info]


async def test_invalid_chunks_get_400_without_a_log_entry(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    session = await proxy.session()
    port = int(proxy.url.rpartition(":")[2])
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {session.api_key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    with caplog.at_level(logging.INFO):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"5\r\n{....\r\nzz\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.split()[1] == b"400"
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_idle_connection_does_not_keep_the_body_of_its_last_request(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    said = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}
    status, _ = await proxy.post(session, "chat/completions", said)
    assert status in (200, 400)
    # `type`, because `isinstance` reads an attribute, and objects of other packages warn then.
    requests = [each for each in gc.get_objects() if issubclass(type(each), web.Request)]
    held = [len(value) for each in requests for value in each.values() if isinstance(value, bytes)]
    assert not held
    assert not any(each._read_bytes for each in requests)


@pytest.mark.parametrize("path", [b"/", b"/v1/models", b"/health", b"/sessions"])
async def test_an_unknown_expect_header_gets_a_417_also_when_it_is_not_utf_8(
    proxy: RunningProxy, path: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
    writer.write(b"Expect: \xff\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] == b"417"


async def test_body_that_does_not_arrive_in_time_is_a_408(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.http.server.BODY_TIMEOUT_S", 0.05)
    session = await proxy.session()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
    writer.write(f"{head}Authorization: Bearer {session.api_key}\r\n\r\n{{".encode())
    answer = await reader.readuntil(b"\r\n")
    writer.close()
    assert answer.split()[1] == b"408"


async def test_connection_without_a_request_is_closed(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.http.server.IDLE_S", 0.05)
    proxy = await start_proxy()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: ")
    assert await reader.read() == b""
    writer.close()


async def test_client_that_reads_nothing_is_disconnected() -> None:
    disconnected = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                async with read_in_time(request, 0.05):
                    await response.write(bytes(2**20))
        except ConnectionResetError:
            disconnected.set()
            raise

    async with serving(endless) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await disconnected.wait()
        writer.close()


class SlowClient:
    """A server that sends more than its client reads, and then calls `until_sent`."""

    def __init__(self) -> None:
        self.buffered = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when `until_sent` has returned, or with its error."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        while not request.transport.get_write_buffer_size():
            await response.write(bytes(2**14))
        limits = request.transport.get_write_buffer_limits()
        self.buffered.set()
        try:
            await until_sent(request)
            assert request.transport.get_write_buffer_size() == 0
            assert request.transport.get_write_buffer_limits() == limits
        except (AssertionError, ConnectionError) as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        return response


@asynccontextmanager
async def slow_client() -> AsyncIterator[
    tuple[SlowClient, asyncio.StreamReader, asyncio.StreamWriter]
]:
    """A client that reads nothing, when the server's buffer is not empty."""
    slow = SlowClient()
    async with serving(slow.answer) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await slow.buffered.wait()
        yield slow, reader, writer
        writer.close()


async def test_until_sent_waits_for_a_client_that_reads_slowly() -> None:
    async with slow_client() as (slow, reader, writer):
        for _ in range(10):
            await asyncio.sleep(0)
        assert not slow.ended.done()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await reader.read()
        await slow.ended


async def test_until_sent_reports_a_client_that_has_left() -> None:
    async with slow_client() as (slow, _, writer):
        writer.transport.abort()
        with pytest.raises(ConnectionError):
            await slow.ended


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, int]]:
    """The address of a server with this handler."""
    app = web.Application()
    app.router.add_get("/", handler)
    runner = app_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0]
    await runner.cleanup()
