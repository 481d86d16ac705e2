"""HTTP responses byte by byte, from a server that sends what the test specifies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.engines.connections import Connections, Response
from proxy.engines.upstream import Upstream
from proxy.errors import ConfigurationError, EngineError, RequestError

Answer = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Answers each request with the next of `answers`, and repeats the last one."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.reader = asyncio.StreamReader()
        """The latest connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.reader = reader
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def says(*parts: bytes, close: bool = False) -> Answer:
    """Sends each part in a packet of its own."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield server
    listener.close()  # not wait_closed(), which also waits for handlers since Python 3.12


@pytest.fixture
async def upstream(server: Server) -> AsyncIterator[Upstream]:
    upstream = Upstream(server.url, stall_timeout_s=5.0)
    yield upstream
    await upstream.close()


async def test_connection_is_reused_after_its_response_was_read(
    server: Server, upstream: Upstream
) -> None:
    server.answers = [says(WHOLE)]
    for body in (b"one", b"two"):
        assert await upstream.post("/x", body) == b"hello"
    assert server.connections == 1
    assert [request.rpartition(b"\r\n\r\n")[2] for request in server.requests] == [b"one", b"two"]


class NoTransport(asyncio.Transport):
    """A connection on which nothing is sent."""

    def writelines(self, parts: object) -> None:
        pass

    def abort(self) -> None:
        pass


async def test_bytes_that_arrived_before_the_connection_broke_are_read_first() -> None:
    response = Response(asyncio.get_running_loop())
    response.connection_made(NoTransport())
    sent = asyncio.create_task(response.send(b"", b"", 5.0))
    await asyncio.sleep(0)  # the reader waits; both of these happen before it runs again
    response.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n")
    response.connection_lost(ConnectionResetError("by the engine"))
    await sent
    parts: list[bytes] = []
    with pytest.raises(ConnectionResetError):
        await response.pass_to(parts.append)
    assert parts == [b"he"]


@pytest.mark.parametrize(
    "answer",
    [
        says(*(bytes([byte]) for byte in WHOLE)),
        says(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
            b"3;ext=1\r\nllo\r",
            b"\n0\r\n\r\n",
        ),
        says(b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE),
        says(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", close=True),
        says(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", close=True),
        says(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", close=True),
    ],
    ids=["bytes", "chunks", "continue", "to the end", "1.0", "close"],
)
async def test_every_form_of_a_body_is_read(
    server: Server, upstream: Upstream, answer: Answer
) -> None:
    server.answers = [answer]
    for _ in range(3):
        assert await upstream.post("/x", b"body") == b"hello"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says(close=True), "in the middle"),
        (says(WHOLE[:-1], close=True), "in the middle"),
        (
            says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhe", close=True),
            "middle",
        ),
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "did not answer in HTTP"),
    ],
    ids=["nothing", "less", "half a chunk", "ssh"],
)
async def test_incomplete_response_is_an_engine_error(
    server: Server, upstream: Upstream, answer: Answer, words: str
) -> None:
    server.answers = [answer, says(WHOLE)]
    with pytest.raises(EngineError, match=words):
        await upstream.post("/x", b"")
    assert await upstream.post("/x", b"") == b"hello"


async def test_unread_response_does_not_leak_into_the_next(
    server: Server, upstream: Upstream
) -> None:
    server.answers = [says(b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nnone"), says(WHOLE)]
    assert await upstream.get("/health", timeout_s=5.0) is None
    assert await upstream.post("/x", b"") == b"hello"


async def test_unsolicited_bytes_close_the_connection(server: Server, upstream: Upstream) -> None:
    server.answers = [says(WHOLE + WHOLE), says(WHOLE)]
    assert await upstream.post("/x", b"") == b"hello"
    assert await upstream.post("/x", b"") == b"hello"
    assert server.connections == 2


async def test_silence_times_out_but_a_slow_response_does_not(server: Server) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        for byte in WHOLE:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE[:-1])
        await asyncio.Event().wait()

    upstream = Upstream(server.url, stall_timeout_s=0.4)
    server.answers = [slow, silent]
    assert await upstream.post("/x", b"") == b"hello"
    with pytest.raises(EngineError, match="in time"):
        await upstream.post("/x", b"")
    await upstream.close()


async def test_connection_is_closed_if_its_reader_leaves(
    server: Server, upstream: Upstream
) -> None:
    called, gone = asyncio.Event(), asyncio.Event()

    async def endless(_: asyncio.StreamWriter) -> None:
        called.set()
        await server.reader.read()
        gone.set()

    server.answers = [endless]
    call = asyncio.create_task(upstream.post("/x", b""))
    await called.wait()
    call.cancel()
    async with asyncio.timeout(10):
        await gone.wait()


@pytest.mark.parametrize("size", [2, 5])
async def test_error_of_the_reader_is_raised_and_the_connection_is_closed(
    server: Server, upstream: Upstream, size: int
) -> None:
    """`size`: of the part at which the reader fails; 5 is the whole body."""
    head, body = WHOLE[: -len(b"hello")], b"data: a\n\n" + WHOLE[-5:]
    head = head.replace(b"5", b"%d" % len(body))
    server.answers = [says(head + body[: -5 + size], body[-5 + size :]), says(WHOLE)]
    seen: list[list[bytes]] = []

    def refuse(payloads: list[bytes]) -> None:
        seen.append(payloads)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await upstream.events("/x", b"", refuse)
    assert seen == [[b"a"]]
    assert await upstream.post("/x", b"") == b"hello"
    assert server.connections == 2


async def test_error_of_the_reader_comes_before_that_of_later_bytes() -> None:
    response = Response(asyncio.get_running_loop())
    response.connection_made(Mock(spec=asyncio.Transport))
    sent = asyncio.create_task(response.send(b"", b"", 5.0))
    await asyncio.sleep(0)
    response.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await sent

    def refuse(part: bytes) -> None:
        raise ValueError("no more")

    passed = asyncio.create_task(response.pass_to(refuse))
    await asyncio.sleep(0)
    response.data_received(b"2\r\nhi\r\nZZ\r\n")
    with pytest.raises(ValueError, match="no more"):
        await passed


@pytest.mark.parametrize(("status", "kind"), [(400, RequestError), (503, EngineError)])
async def test_message_of_a_refusal_is_read(
    server: Server, upstream: Upstream, status: int, kind: type[Exception]
) -> None:
    body = b'{"error": {"message": "too many ', b'tokens"}}'
    head = b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(b"".join(body)))
    server.answers = [says(head, *body)]
    with pytest.raises(kind, match="too many tokens"):
        await upstream.post("/x", b"")


@pytest.mark.parametrize(
    ("url", "key"), [("127.0.0.1:8000", None), ("ftp://host", None), ("http://host", "a\nHost: b")]
)
def test_url_or_key_that_cannot_be_sent_is_refused_at_start(url: str, key: str | None) -> None:
    with pytest.raises(ConfigurationError, match="engines: "):
        Upstream(url, api_key=key)


async def test_connection_that_was_idle_too_long_is_not_reused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.engines.connections.IDLE_S", 0.0)
    server.answers = [says(WHOLE)]
    connections = Connections(server.url, {}, connect_timeout_s=5.0)
    for _ in range(2):
        response = await connections.send("POST", "/x", b"", stall_s=5.0)
        assert await response.read() == b"hello"
        connections.release(response)
    connections.close()
    assert server.connections == 2
