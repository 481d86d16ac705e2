"""The binary route to a vLLM server, from both sides. `test_clients.py` has the common cases."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.engines.address import EngineAddress
from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError
from proxy.extras.binary_route.client import FramesClient
from proxy.extras.binary_route.frames import (
    ID,
    LOGPROB,
    PATH,
    CallEnd,
    CancelCall,
    Sampled,
    StartCall,
    read_request,
    read_sampled,
    write,
)
from proxy.extras.binary_route.server import FramesConnection, Output
from proxy.records import FinishReason
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from tests.proxy.pushed import chunks_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [5, 6, 7, 2]
REQUEST = {"request_id": "r", "sampling_params": {"logprobs": 0}, "stream": True}


def sampled(counts: dict[int, int], **more: Any) -> Sampled:
    tokens = sum(counts.values())
    return Sampled(
        calls=np.array(list(counts), ID).tobytes(),
        counts=np.array(list(counts.values()), ID).tobytes(),
        ids=np.arange(tokens, dtype=ID).tobytes(),
        logprobs=np.full(tokens, -0.5, LOGPROB).tobytes(),
        **more,
    )


class Received:
    """What a call has got."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ranked: list[Any] = []
        self.ends: list[CallEnd] = []

    def take(self, ids: list[int], logprobs: list[float], ranked: Any, end: CallEnd | None) -> None:
        assert len(ids) == len(logprobs)
        assert not self.ends, "tokens after the end"
        self.ids += ids
        self.ranked += ranked or []
        self.ends += [] if end is None else [end]


Answer = Callable[[web.WebSocketResponse, list[StartCall]], Awaitable[None]]


@asynccontextmanager
async def served_by(answer: Answer, calls: int) -> AsyncIterator[FramesClient]:
    """A client whose server calls `answer` when it has so many requests."""

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        requests: list[StartCall] = []
        async for message in socket:
            requests.append(cast(StartCall, read_request(message.data)))
            if len(requests) == calls:
                await answer(socket, requests)
        return socket

    app = web.Application()
    app.router.add_get(PATH, handle)
    async with TestServer(app) as server:
        client = FramesClient(EngineAddress(str(server.make_url("")).rstrip("/")))
        assert await client.connect()
        yield client
        await client.close()


async def test_tokens_of_several_calls_in_one_message_reach_their_calls() -> None:
    async def answer(socket: web.WebSocketResponse, requests: list[StartCall]) -> None:
        first, second = (request.call for request in requests)
        ends = [CallEnd(first, finish="stop"), CallEnd(second, finish="length")]
        # The first call twice in one message: its end comes after both.
        counts = np.array([2, 3, 1], ID).tobytes()
        calls = np.array([first, second, first], ID).tobytes()
        message = sampled({0: 6}, ends=ends)
        message.calls, message.counts = calls, counts
        await socket.send_bytes(write(message))

    async with served_by(answer, 2) as client:
        one, two = Received(), Received()
        await asyncio.gather(
            client.sample(PROMPT, REQUEST, one.take), client.sample(PROMPT, REQUEST, two.take)
        )
    assert (one.ids, two.ids) == ([0, 1, 5], [2, 3, 4])
    assert [end.finish for end in one.ends + two.ends] == ["stop", "length"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": np.array([1], ID).tobytes()},
        {"counts": np.array([-1], ID).tobytes()},
        {"calls": np.array([1, 2], ID).tobytes()},
        {"ids": b"12345"},
        {"logprobs": np.full(3, -0.5, LOGPROB).tobytes()},
        {"alternative_counts": np.array([1], ID).tobytes()},
        {"alternative_counts": np.array([1, 1], ID).tobytes()},
        {"alternative_counts": np.array([1, -1], ID).tobytes()},
    ],
    ids=str,
)
async def test_columns_that_do_not_belong_together_are_an_engine_error(
    wrong: dict[str, bytes],
) -> None:
    async def answer(socket: web.WebSocketResponse, requests: list[StartCall]) -> None:
        message = sampled({requests[0].call: 2})
        for name, value in wrong.items():
            setattr(message, name, value)
        await socket.send_bytes(write(message))

    async with served_by(answer, 1) as client:
        received = Received()
        with pytest.raises(EngineError, match=r"127\.0\.0\.1.*invalid message"):
            await client.sample(PROMPT, REQUEST, received.take)
    assert received.ids == []


@pytest.mark.parametrize("text", [b"", b"\x93\x01", b"\xc0", bytes(range(256))])
async def test_message_that_is_not_one_is_an_engine_error(text: bytes) -> None:
    async def answer(socket: web.WebSocketResponse, requests: list[StartCall]) -> None:
        await socket.send_bytes(text)

    async with served_by(answer, 2) as client:
        calls = [client.sample(PROMPT, REQUEST, Received().take) for _ in range(2)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(failure) for failure in failures] == [EngineError, EngineError]


async def test_error_of_one_taker_leaves_the_other_calls_alone() -> None:
    cancelled: list[Any] = []

    async def answer(socket: web.WebSocketResponse, requests: list[StartCall]) -> None:
        first, second = (request.call for request in requests)
        await socket.send_bytes(write(sampled({first: 1, second: 1})))
        cancelled.append(read_request((await socket.receive()).data))
        await socket.send_bytes(
            write(sampled({first: 1, second: 1}, ends=[CallEnd(second, "stop")]))
        )

    def refuse(*_: Any) -> None:
        raise ValueError("enough")

    async with served_by(answer, 2) as client:
        other = Received()
        outcomes = await asyncio.gather(
            client.sample(PROMPT, REQUEST, refuse),
            client.sample(PROMPT, REQUEST, other.take),
            return_exceptions=True,
        )
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] is None
    assert cancelled == [CancelCall(1)]
    assert len(other.ids) == 2


async def test_only_the_call_that_stalls_fails() -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        client = FramesClient(EngineAddress(server.url), stall_timeout_s=0.2)
        assert await client.connect()
        server.faults = [Fault("stall", after_tokens=1)]
        request = {**REQUEST, "sampling_params": {"logprobs": 0, "max_tokens": 9}}
        stalled = asyncio.create_task(client.sample(PROMPT, request, Received().take))
        await server.called.wait()
        healthy = Received()
        await client.sample(PROMPT, {**request, "request_id": "other"}, healthy.take)
        with pytest.raises(EngineError, match="in time"):
            await stalled
        assert healthy.ids == ANSWER
        await client.close()


async def test_calls_reconnect_after_a_lost_connection() -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        engine = VllmEngine(server.url)
        await engine.check()
        server.faults = [Fault("die", after_tokens=1)]
        with pytest.raises(EngineError, match="closed the connection"):
            await answered(engine)
        again = await asyncio.gather(*(answered(engine, str(at)) for at in range(8)))
        assert again == [ANSWER] * 8
        assert engine.info.in_flight == 0
        await engine.close()


async def test_call_that_meets_a_connection_that_was_just_lost_fails_at_once() -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        client = FramesClient(EngineAddress(server.url))
        assert await client.connect()
        connection = client._connection
        assert connection is not None
        await connection.close()
        with pytest.raises(EngineError, match="closed the connection"):
            await client.sample(PROMPT, REQUEST, Received().take)
        assert connection._calls == {}
        await client.close()


async def test_server_without_the_route_gets_json(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        engine = VllmEngine(server.url)
        await engine.check()
        port = int(server.url.rpartition(":")[2])
        await server.close()
        server.frames = False
        await server.start(port=port)
        assert await answered(engine) == ANSWER  # not an error: it restarted without the route
        assert not engine._has_frames
        await server.close()
        with pytest.raises(EngineError):
            await engine.check()
        server.frames = True
        await server.start(port=port)
        await engine.check()
        assert engine._has_frames
        assert await answered(engine, "again") == ANSWER
        monkeypatch.setattr(engine._frames, "max_prompt_tokens", 2)
        monkeypatch.setattr(engine._frames, "sample", None)
        assert await answered(engine, "long") == ANSWER
        await engine.close()


async def answered(engine: VllmEngine, request_id: str = "r") -> list[int]:
    call = chunks_of(engine, PROMPT, Sampling(max_tokens=9), request_id=request_id)
    return [token async for chunk in call for token in chunk.ids]


async def test_alternatives_are_those_of_the_json_route() -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        by_frames, by_json = VllmEngine(server.url), VllmEngine(server.url)
        await by_frames.check()
        wanted = Sampling(max_tokens=9, alternatives=3, top_logprobs=2, experts_from=0)
        plain = Sampling(max_tokens=9)
        chunks = await asyncio.gather(
            *(whole(by_frames, each, f"{at}") for at, each in enumerate([plain, wanted, plain])),
            *(whole(by_json, each, f"j{at}") for at, each in enumerate([plain, wanted, plain])),
        )
        for ours, theirs in zip(chunks[:3], chunks[3:], strict=True):
            assert repr(ours) == repr(theirs)
        assert chunks[1].routed_experts is not None
        await by_frames.close()
        await by_json.close()


async def whole(engine: VllmEngine, sampling: Sampling, request_id: str) -> Chunk:
    call = chunks_of(engine, PROMPT, sampling, request_id=request_id, stream=False)
    (chunk,) = [each async for each in call]
    assert chunk.finish_reason is FinishReason.STOP
    return chunk


class Socket:
    """Implements `proxy.extras.binary_route.server.Socket`."""

    def __init__(self, *requests: Any) -> None:
        self.requests = [write(request) for request in requests]
        self.sent: list[Sampled] = []
        self.ended = asyncio.Event()

    async def receive(self) -> bytes | None:
        if self.requests:
            return self.requests.pop(0)
        await self.ended.wait()
        return None

    async def send(self, data: bytes) -> None:
        self.sent.append(read_sampled(data))
        if self.sent[-1].ends:
            self.ended.set()


class TwoOutputs:
    """Implements `TokenSource`: each call has two outputs at a time."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.cancelled: list[str] = []

    async def sample(self, body: dict[str, Any]) -> AsyncIterator[Output]:
        name = body["request_id"]
        self.began.append(name)
        try:
            if name == "waits":
                await asyncio.Event().wait()
            for at in range(2):
                yield self.output(body, at)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    def output(self, body: dict[str, Any], at: int) -> Output:
        tops = {9: SimpleNamespace(logprob=float("-inf")), 8: SimpleNamespace(logprob=float("nan"))}
        known = {} if body["request_id"] == "unknown" else {7: SimpleNamespace(logprob=-0.25)}
        return cast(
            Output,
            SimpleNamespace(
                token_ids=[7],
                logprobs=[{**known, **tops}],
                finish_reason="stop" if at else None,
                stop_reason=None,
                weight_versions=None,
                routed_experts=None,
            ),
        )

    def error(self, failure: Exception) -> tuple[int, str]:
        return 400, f"refused: {failure}"


def generate(call: int, name: str, alternatives: int = 0) -> StartCall:
    params = {"logprobs": alternatives}
    return StartCall(call, PROMPT.tobytes(), {"request_id": name, "sampling_params": params})


async def test_one_message_has_the_tokens_of_all_calls_and_only_wanted_alternatives() -> None:
    socket = Socket(generate(1, "a"), generate(2, "b", 3), generate(3, "unknown"))
    await asyncio.wait_for(FramesConnection(TwoOutputs(), socket).serve(), 10)
    (message,) = socket.sent
    assert np.frombuffer(message.calls, ID).tolist() == [1, 1, 2, 2, 3, 3]
    logprobs = np.frombuffer(message.logprobs, LOGPROB).tolist()
    assert logprobs == [-0.25] * 4 + [MISSING_LOGPROB] * 2
    assert np.frombuffer(message.alternative_counts, ID).tolist() == [0, 0, 3, 3, 0, 0]
    others = np.frombuffer(message.alternative_logprobs, LOGPROB).tolist()
    assert others == [-0.25, MISSING_LOGPROB, MISSING_LOGPROB] * 2
    assert [end.call for end in message.ends] == [1, 2, 3]


async def test_call_that_is_cancelled_before_it_began_is_never_sampled() -> None:
    source = TwoOutputs()
    socket = Socket(generate(1, "gone"), CancelCall(1), CancelCall(7), generate(2, "a"))
    connection = FramesConnection(source, socket)
    await asyncio.wait_for(connection.serve(), 10)
    assert source.began == ["a"]
    assert {end.call for message in socket.sent for end in message.ends} == {2}
    assert connection._running == {}


async def test_calls_end_with_their_connection() -> None:
    source = TwoOutputs()
    socket = Socket(generate(1, "waits"), generate(2, "a"))
    await asyncio.wait_for(FramesConnection(source, socket).serve(), 10)
    assert source.cancelled == ["waits"]


async def test_output_without_its_logprobs_fails_its_call_alone() -> None:
    class Broken(TwoOutputs):
        def output(self, body: dict[str, Any], at: int) -> Output:
            output = super().output(body, at)
            if body["request_id"] == "broken":
                output.logprobs = []
            return output

    socket = Socket(generate(1, "a"), generate(2, "broken"), generate(3, "b"))
    await asyncio.wait_for(FramesConnection(Broken(), socket).serve(), 10)
    (message,) = socket.sent
    assert np.frombuffer(message.calls, ID).tolist() == [1, 1, 3, 3]
    assert {end.call: end.finish for end in message.ends} == {1: "stop", 2: None, 3: "stop"}


async def test_error_of_the_source_ends_its_call() -> None:
    socket = Socket(StartCall(4, PROMPT.tobytes(), {}))
    await asyncio.wait_for(FramesConnection(TwoOutputs(), socket).serve(), 10)
    (end,) = socket.sent[0].ends
    assert (end.call, end.code, end.error) == (4, 400, "refused: 'sampling_params'")


def test_plugin_imports_only_what_a_vllm_server_has() -> None:
    """So that it can be used in the environment of another vLLM without our dependencies."""
    ours = {"aiohttp", "pydantic", "orjson", "httptools", "shortuuid", "yaml", "tenacity"}
    code = f"import proxy.extras.binary_route.vllm, sys; print({ours!r} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
