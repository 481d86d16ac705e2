"""An engine's invalid answer is an engine error in every wire format and never a finished turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import numpy as np
import pytest

from proxy.config import EngineConfig
from proxy.engines.answer_check import MAX_LOGPROB, MIN_LOGPROB, AnswerCheck
from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.engines.registry import make_engine
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError
from proxy.extras.relay.engine import RelayEngine
from proxy.extras.relay.protocol import (
    Fingerprint,
    Frame,
    Generate,
    Hello,
    ProtocolError,
    ToWorker,
    decode_to_proxy,
    encode,
)
from proxy.records import FinishReason, TurnStatus, VersionSpan
from proxy.rendering.rendering import Rendering
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from tests.proxy.conftest import StartProxy
from tests.proxy.engines.nonsense import (
    FORMS,
    MAX_TOKENS,
    NONSENSE,
    VOCAB_SIZE,
    NonsenseServer,
    nonsense_server,
)
from tests.proxy.pushed import pieces_of

PROMPT = np.array([11, 12, 13], np.int32)
CASES = [
    pytest.param(kind, name, id=f"{kind}: {name}")
    for kind, form in FORMS.items()
    for name in NONSENSE
    if name not in form.without
]


@pytest.fixture
async def server(kind: str) -> AsyncIterator[NonsenseServer]:
    async with nonsense_server(FORMS[kind]) as server:
        yield server


@pytest.fixture
async def router(kind: str, server: NonsenseServer, rendering: Rendering) -> AsyncIterator[Router]:
    engine = make_engine(EngineConfig(url=server.url, kind=kind), rendering)
    router = Router([engine], vocab_size=VOCAB_SIZE, patience_s=0)
    yield router
    await router.close()


async def sample(router: Router, **more: object) -> list[Chunk]:
    sampling = Sampling(**{"max_tokens": MAX_TOKENS, **more})  # type: ignore[arg-type]
    call = Generation(router, PROMPT, sampling, request_id="s#0", session_id="s")
    return [piece async for piece in pieces_of(call) if isinstance(piece, Chunk)]


@pytest.mark.parametrize("together", [True, False], ids=["in one write", "event by event"])
@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_invalid_answer_is_an_engine_error_without_the_address(
    kind: str,
    name: str,
    together: bool,
    server: NonsenseServer,
    router: Router,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.events, server.together = NONSENSE[name], together
    with caplog.at_level(logging.WARNING), pytest.raises(EngineError) as failed:
        await sample(router, top_logprobs=0 if kind == "text" else 1)
    assert failed.value.status == 502
    assert server.url not in failed.value.message
    failure_id = failed.value.message.partition("(id ")[2].partition(")")[0]
    assert failure_id
    assert f"(id {failure_id})" in caplog.text
    assert all(info.in_flight == 0 for info in router.infos)


@pytest.mark.parametrize("kind", FORMS)
async def test_endless_stream_is_stopped_at_max_tokens(
    server: NonsenseServer, router: Router
) -> None:
    server.endless = True
    with pytest.raises(EngineError) as failed:
        await sample(router)
    assert failed.value.status == 502
    await asyncio.wait_for(server.left.wait(), 10)


@pytest.mark.parametrize("kind", ["vllm"])
async def test_turn_with_an_invalid_answer_is_cut_and_counted(
    kind: str, server: NonsenseServer, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy()
    for engine in await proxy.control.engines():
        await proxy.control.remove_engine(engine["name"])
    await proxy.control.add_engine(server.url, name="odd")
    server.events = NONSENSE["log-probability +5"]
    session = await proxy.session()
    body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 20}
    status, reply = await proxy.post(session, "chat/completions", body)
    assert status == 502
    assert "127.0.0.1" not in str(reply)
    _, turns = await proxy.record(session)
    assert {turn.status for turn in turns} <= {TurnStatus.CUT}
    assert turns
    headers = {"Authorization": "Bearer admin-key-of-the-tests"}
    async with proxy.http.get(f"{proxy.url}/metrics", headers=headers) as response:
        metrics = await response.text()
    assert 'agentic_proxy_engine_failures_total{engine="odd",status="502"}' in metrics


def check(**more: object) -> AnswerCheck:
    given = {"vocab_size": VOCAB_SIZE, **more}
    return AnswerCheck(Sampling(max_tokens=MAX_TOKENS), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 2 * MAX_LOGPROB, -5000.0, MIN_LOGPROB - 0.5],
)
def test_log_probability_must_be_one_that_a_sampled_token_can_have(value: float) -> None:
    for logprobs in ([value], [-0.5, value, -0.1], [value, -0.5, 0.0], [-0.5, 0.0, value]):
        with pytest.raises(EngineError, match=f"log-probability {value}"):
            check().take(Chunk([5] * len(logprobs), logprobs))


@pytest.mark.parametrize("value", [MAX_LOGPROB, float(np.log(np.float64(1.4e-45)))])
def test_log_probability_of_the_rarest_token_or_slightly_above_zero_passes(value: float) -> None:
    chunk = Chunk([5], [value])
    assert check().take(chunk) is chunk


def test_log_probabilities_of_a_text_only_engine_must_be_nan() -> None:
    chunk = Chunk([5], [float("nan")])
    assert check(text_only=True).take(chunk) is chunk
    with pytest.raises(EngineError):
        check(text_only=True).take(Chunk([5], [-0.5]))


def test_nothing_may_follow_the_finish_reason() -> None:
    checked = check()
    checked.take(Chunk([5], [-0.5], finish_reason=FinishReason.STOP))
    with pytest.raises(EngineError, match="after its finish reason"):
        checked.take(Chunk([], []))


class Wire:
    """The hub's side of a worker's connection."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def post(self, message: ToWorker) -> None:
        if isinstance(message, Generate):
            self.asked.set()

    def drop(self, reason: str) -> None:
        """Nothing to close."""


def a_frame(number: int, ids: list[int], logprobs: list[float], **more: object) -> Frame:
    return Frame(
        0,
        number,
        np.array(ids, np.int64).astype("<i4").tobytes(),
        np.array(logprobs, "<f4").tobytes(),
        **more,  # type: ignore[arg-type]
    )


FRAMES = {
    "id outside the vocabulary": [a_frame(0, [VOCAB_SIZE], [-0.5])],
    "negative id": [a_frame(0, [-1], [-0.5])],
    "log-probability +5": [a_frame(0, [5], [5.0])],
    "log-probability nan": [a_frame(0, [5], [float("nan")])],
    "more ids than log-probabilities": [a_frame(0, [5, 6], [-0.5])],
    "more than max_tokens": [a_frame(0, [5] * 9, [-0.5] * 9)],
    "unknown finish reason": [a_frame(0, [5], [-0.5], finish="tired")],
    "version spans that end late": [a_frame(0, [5], [-0.5], finish="stop", versions=((1, 0, 2),))],
    "version spans with a gap": [
        a_frame(0, [5, 6], [-0.5] * 2, finish="stop", versions=((1, 0, 1), (2, 2, 2)))
    ],
}


@pytest.mark.parametrize("name", FRAMES)
async def test_invalid_frame_of_a_relay_worker_is_an_engine_error(name: str) -> None:
    hello = Hello(1, "gpu-0", "i", Fingerprint("", ""), None, 0, None, 9, ())
    engine = RelayEngine(hello, window=64, grace_s=30, on_lost=lambda _: None)
    wire = Wire()
    engine.attach(wire, hello)
    router = Router([engine], vocab_size=VOCAB_SIZE, patience_s=0)
    call = asyncio.create_task(sample(router))
    await wire.asked.wait()
    try:
        for frame in FRAMES[name]:
            engine.receive(frame)
    except ProtocolError as error:  # as the hub does
        engine.lose(f"{error}", status=502)
    with pytest.raises(EngineError) as failed:
        await call
    assert failed.value.status == 502
    assert "gpu-0" not in failed.value.message
    await router.close()


def test_weight_version_of_a_worker_is_an_int32() -> None:
    frame = a_frame(0, [5], [-0.5], finish="stop", versions=((2**31, 0, 1),))
    with pytest.raises(ProtocolError):
        decode_to_proxy(encode(frame))


def make_outside(config: EngineConfig, rendering: Rendering) -> Engine:
    """Implements `proxy.engines.registry.MakeEngine`."""
    return VllmEngine.from_config(config, rendering)


async def test_engine_from_outside_the_package_is_loaded_by_its_import_path(
    rendering: Rendering,
) -> None:
    config = EngineConfig(url="http://127.0.0.1:9", kind=f"{__name__}:make_outside", name="mine")
    engine = make_engine(config, rendering)
    assert engine.info.name == "mine"
    await engine.close()


def test_version_spans_must_cover_the_answer() -> None:
    chunk = Chunk([5, 6], [-0.5] * 2, finish_reason=FinishReason.STOP)
    chunk.versions = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    assert check().take(chunk) is chunk
    chunk.versions = (VersionSpan(1, 0, 1), VersionSpan(2**31, 1, 2))
    with pytest.raises(EngineError, match="weight version"):
        check().take(chunk)
