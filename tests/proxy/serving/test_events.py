"""An agent that streams gets every piece once and in order, however it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from proxy.config import LimitsConfig
from proxy.errors import EngineError, ProxyError
from proxy.http.server import app_runner
from proxy.rendering.deltas import TextDelta
from proxy.serving.answer import AnswerStream
from proxy.serving.events import EventSender
from proxy.wire.dialect import Outcome, Piece
from tests.proxy.conftest import StartProxy

LARGE = "x" * 40_000


class Words:
    """Writes `[`, the text of each piece, and `]` or `!`."""

    def start(self, prompt_tokens: int, turn: int) -> bytes:
        return b"["

    def piece(self, piece: Piece) -> bytes:
        (delta,) = piece.deltas
        if delta.text == "fault":
            raise ValueError("a piece that cannot be written")
        return delta.text.encode()

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        return b"]"

    def error(self, error: ProxyError) -> bytes:
        return b"!"


class Streamed:
    """A call whose pieces the test pushes, and one agent that reads them."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.stream = AnswerStream()
        self.limits = limits
        self.request: asyncio.Future[web.Request] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the response has ended, or with its error."""
        self.sender: EventSender

    def push(self, *texts: str) -> None:
        for text in texts:
            self.stream.push(Piece(0, (TextDelta(text),)))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = SimpleNamespace(stream=self.stream, prompt_tokens=1, turns=[0])
        watcher: Any = SimpleNamespace(call=call, outcomes=self.stream.outcomes)
        self.sender = EventSender(request, watcher, Words(), self.limits)
        self.request.set_result(request)
        try:
            response = await self.sender.send()
        except Exception as error:
            self.ended.set_exception(error)
            raise
        self.ended.set_result(None)
        return response


@asynccontextmanager
async def streamed(
    version: str = "1.1", **limits: float
) -> AsyncIterator[tuple[Streamed, asyncio.StreamReader]]:
    call = Streamed(LimitsConfig(**limits))
    app = web.Application()
    app.router.add_get("/", call.handle)
    runner = app_runner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(b"GET / HTTP/%b\r\nHost: localhost\r\n\r\n" % version.encode())
    try:
        async with asyncio.timeout(30):
            await call.request
            yield call, reader
    finally:
        writer.close()
        await runner.cleanup()


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The body in chunks, up to its end."""
    await reader.readuntil(b"\r\n\r\n")
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return body


async def until_following(call: Streamed) -> None:
    while (  # noqa: ASYNC110 (the task of the request comes to its rest)
        following := call.sender._following
    ) is None or following.done():
        await asyncio.sleep(0)


async def test_pieces_after_the_first_one_are_written_without_the_requests_task() -> None:
    async with streamed() as (call, reader):
        call.push("a")
        await until_following(call)
        following = call.sender._following
        call.push("b", "", "c")
        assert call.sender._following is following
        assert not following.done()
        call.stream.finish([])
        assert await body_of(reader) == b"[abc]"
        await call.ended


async def test_pieces_that_come_before_the_task_runs_keep_their_order() -> None:
    async with streamed() as (call, reader):
        call.push("a", "b")
        for text in "cdefgh":
            await asyncio.sleep(0)
            call.push(text)
        call.stream.finish([])
        assert await body_of(reader) == b"[abcdefgh]"


async def test_agent_that_reads_slowly_gets_every_piece_in_order() -> None:
    texts = [f"{n}{LARGE}" for n in range(300)]
    async with streamed() as (call, reader):
        request = await call.request
        call.push("a")
        await until_following(call)
        while not request.protocol.writing_paused:
            call.push(texts.pop(0))
        rest = texts[:40]
        call.push(*rest)
        assert request.transport is not None
        assert request.transport.get_write_buffer_size() < len(rest) * len(LARGE)
        call.stream.finish([])
        body = await body_of(reader)
        assert body.startswith(b"[a0x")
        assert body.endswith("".join(rest).encode() + b"]")


async def test_agent_that_reads_nothing_is_disconnected() -> None:
    async with streamed(unread_s=0.05) as (call, _):
        request = await call.request
        call.push("a")
        await until_following(call)
        while not request.protocol.writing_paused:
            call.push(LARGE)
        call.push(LARGE)
        with pytest.raises(ConnectionResetError, match="read nothing"):
            await call.ended
        assert not call.stream.followers


async def test_fault_of_one_response_does_not_reach_the_call() -> None:
    async with streamed() as (call, _):
        call.push("a")
        await until_following(call)
        call.push("fault", "b")
        with pytest.raises(ValueError, match="cannot be written"):
            await call.ended
        call.push("c")


async def test_error_after_the_first_piece_is_an_event() -> None:
    async with streamed() as (call, reader):
        call.push("a")
        await until_following(call)
        call.stream.fail(EngineError("failed"))
        assert await body_of(reader) == b"[a!"


async def test_http_1_0_gets_no_chunks() -> None:
    async with streamed(version="1.0") as (call, reader):
        call.push("a")
        await until_following(call)
        call.push("b")
        await until_following(call)
        call.push("c")
        call.stream.finish([])
        assert (await reader.read()).partition(b"\r\n\r\n")[2] == b"[abc]"


@pytest.mark.parametrize(
    ("route", "tool"),
    [
        ("responses", {"type": "custom", "name": "apply_patch"}),
        ("chat/completions", {"type": "custom", "custom": {"name": "apply_patch"}}),
    ],
)
async def test_a_stream_is_kept_alive_while_its_dialect_shows_nothing_of_what_is_sampled(
    route: str, tool: dict[str, Any], start_proxy: StartProxy
) -> None:
    """A free-form call is sent when it is whole."""
    proxy = await start_proxy(limits={"keep_alive_s": 0.1})
    proxy.engine.token_delay_s = 0.02
    session = await proxy.session()
    words = "hm x " * 25
    proxy.answers(
        f'<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": "{words}"}}}}\n</tool_call>'
    )
    asked = {"messages": [{"role": "user", "content": "Go."}], "input": "Go."}
    body = {"model": "m", "stream": True, "tools": [tool], **asked}
    body.pop("input" if route.startswith("chat") else "messages")
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/{route}"
    async with proxy.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        sent = await response.read()
    assert sent.count(b": keep-alive") >= 5
    assert b"hm x" in sent
