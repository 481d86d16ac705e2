"""Every engine client against a scripted server of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.engines.upstream import Upstream
from proxy.engines.vllm import VllmEngine, WeightSpan, version_spans
from proxy.errors import EngineError, RequestError
from proxy.extras.engines.completions import CompletionsEngine
from proxy.extras.engines.sglang import SglangEngine
from proxy.records import FinishReason, VersionSpan
from proxy.testing.scripted_engine import Fault, ScriptedEngine, scripted_logprob
from tests.proxy.pushed import chunks_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [5, 6, 7, 2]


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as engine:
        yield engine


class FramesEngine(VllmEngine):
    """One that has learned that the server has the binary route."""


@pytest.fixture(params=[VllmEngine, FramesEngine, CompletionsEngine, SglangEngine])
async def engine(server: ScriptedEngine, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    client: Engine = request.param(server.url, stall_timeout_s=5.0)
    if isinstance(client, FramesEngine):
        await client.check()
        server.checked.clear()
    yield client
    await client.close()


async def sample(engine: Engine, *, stream: bool, **sampling: object) -> list[Chunk]:
    wanted = Sampling(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    call = chunks_of(engine, PROMPT, wanted, request_id="r-1", cache_salt="s", stream=stream)
    return [chunk async for chunk in call]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_returns_exactly_what_the_engine_sampled(
    server: ScriptedEngine, engine: Engine, stream: bool
) -> None:
    server.version = 3
    chunks = await sample(engine, stream=stream)
    assert [i for c in chunks for i in c.ids] == ANSWER
    path = [13, *ANSWER]
    expected = [scripted_logprob(a, b) for a, b in zip(path, ANSWER, strict=False)]
    assert [p for c in chunks for p in c.logprobs] == expected
    assert [c.finish_reason for c in chunks if c.finish_reason] == [FinishReason.STOP]
    assert engine.info.in_flight == 0
    (call,) = server.calls
    assert call.prompt_ids == PROMPT.tolist()
    assert (call.cache_salt, call.stream) == ("s", stream)


async def test_script_may_be_a_coroutine_function(server: ScriptedEngine, engine: Engine) -> None:
    async def script(prompt_ids: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [*prompt_ids, *ANSWER]

    server.script = script
    chunks = await sample(engine, stream=True)
    assert [i for c in chunks for i in c.ids] == [*PROMPT.tolist(), *ANSWER]


async def test_engines_defaults_never_change_the_distribution(
    server: ScriptedEngine, engine: Engine
) -> None:
    await sample(engine, stream=False)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert neutral.items() <= server.calls[0].sampling.items()
    assert server.calls[0].sampling["repetition_penalty"] == 1.0


async def test_finish_reason_of_a_truncated_answer_is_length(
    server: ScriptedEngine, engine: Engine
) -> None:
    chunks = await sample(engine, stream=True, max_tokens=2)
    assert [i for c in chunks for i in c.ids] == ANSWER[:2]
    assert chunks[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stream", [True, False])
async def test_whole_answer_has_one_version_span(
    server: ScriptedEngine, engine: Engine, stream: bool
) -> None:
    server.version = 3
    chunks = await sample(engine, stream=stream)
    reported = () if isinstance(engine, CompletionsEngine) else (VersionSpan(3, 0, 4),)
    assert chunks[-1].versions == reported


async def test_vllm_reports_versions_that_change_during_an_answer(server: ScriptedEngine) -> None:
    engine = VllmEngine(server.url)
    server.token_delay_s = 0.02
    versions: tuple[VersionSpan, ...] = ()
    async for chunk in chunks_of(engine, PROMPT, Sampling(max_tokens=9), request_id="r"):
        server.version = 4
        versions = chunk.versions or versions
    assert versions == (VersionSpan(0, 0, 1), VersionSpan(4, 1, 4))
    assert engine.info.version == 4
    await engine.close()


async def test_vllm_answer_that_began_before_the_first_update_has_version_0_until_then(
    server: ScriptedEngine,
) -> None:
    engine = VllmEngine(server.url)
    server.version = 1
    await engine.check()  # the engine has the update, which the running answer saw later
    spans = [WeightSpan("default", 0, 2), WeightSpan("1", 2, 4)]
    assert version_spans(spans, engine.info) == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4))
    await engine.close()


@pytest.mark.parametrize("engine", [VllmEngine, FramesEngine, SglangEngine], indirect=True)
async def test_abort_sends_the_request_id_to_the_engine(
    server: ScriptedEngine, engine: Engine
) -> None:
    server.token_delay_s = 30.0
    reader = asyncio.create_task(sample(engine, stream=False))
    await server.called.wait()
    await engine.abort("r-1")
    assert (await reader)[-1].finish_reason is FinishReason.CUT
    assert server.aborts == ["r-1"]


@pytest.mark.parametrize("engine", [CompletionsEngine], indirect=True)
async def test_completions_without_token_ids_are_an_engine_error(
    server: ScriptedEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OpenAI-compatible server that reports only text."""
    body = b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1]}}]}'

    async def texts_only(*_: object, **__: object) -> bytes:
        return body

    monkeypatch.setattr(Upstream, "post", texts_only)
    with pytest.raises(EngineError, match="without its id"):
        await sample(engine, stream=False)


@pytest.mark.parametrize("engine", [SglangEngine], indirect=True)
async def test_sglang_gets_its_own_parameter_names(server: ScriptedEngine, engine: Engine) -> None:
    await sample(engine, stream=False, seed=3, structured={"json": {"type": "object"}})
    asked = server.calls[0].sampling
    assert asked["max_new_tokens"] == 100
    assert asked["sampling_seed"] == 3
    assert asked["json_schema"] == '{"type":"object"}'
    with pytest.raises(RequestError, match="choice"):
        await sample(engine, stream=False, structured={"choice": ["a"]})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["error", "die", "nonsense", "missing_logprob"])
async def test_failed_engine_is_an_engine_error(
    server: ScriptedEngine, engine: Engine, kind: str, stream: bool
) -> None:
    server.faults = [Fault(kind)]  # type: ignore[arg-type]
    with pytest.raises(EngineError) as failed:
        await sample(engine, stream=stream)
    assert server.url in failed.value.message
    assert engine.info.in_flight == 0


@pytest.mark.parametrize("kind", ["error", "die", "nonsense"])
async def test_tokens_before_a_failure_in_mid_stream_are_given_out(
    server: ScriptedEngine, engine: Engine, kind: str
) -> None:
    server.faults = [Fault(kind, after_tokens=2)]  # type: ignore[arg-type]
    seen: list[int] = []

    async def read() -> None:
        async for chunk in chunks_of(engine, PROMPT, Sampling(max_tokens=9), request_id="r"):
            seen.extend(chunk.ids)

    with pytest.raises(EngineError):
        await read()
    assert seen == ANSWER[:2]


async def test_silent_engine_times_out(server: ScriptedEngine) -> None:
    engine = VllmEngine(server.url, stall_timeout_s=0.1)
    server.faults = [Fault("stall", after_tokens=1)]
    with pytest.raises(EngineError, match="in time"):
        await sample(engine, stream=True)
    await engine.close()


async def test_refused_parameters_raise_an_engine_refusal(
    server: ScriptedEngine, engine: Engine
) -> None:
    server.max_context_tokens = 2
    with pytest.raises(RequestError, match="max_model_len"):
        await sample(engine, stream=True)


async def test_closing_the_generator_aborts_the_call(
    server: ScriptedEngine, engine: Engine
) -> None:
    server.faults = [Fault("stall", after_tokens=1)]
    async with aclosing(
        chunks_of(engine, PROMPT, Sampling(max_tokens=9), request_id="r")
    ) as generation:
        await anext(generation)
    await asyncio.wait_for(server.calls[0].abort.wait(), 10)
    assert engine.info.in_flight == 0


@pytest.mark.parametrize("after_tokens", [1, 2])
async def test_error_of_the_taker_aborts_the_call(
    server: ScriptedEngine, engine: Engine, after_tokens: int
) -> None:
    server.faults = [Fault("stall", after_tokens=3)]
    seen: list[int] = []

    def take(chunk: Chunk) -> None:
        seen.extend(chunk.ids)
        if len(seen) >= after_tokens:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await engine.generate(PROMPT, Sampling(max_tokens=9), take, request_id="r")
    await asyncio.wait_for(server.calls[0].abort.wait(), 10)
    assert seen == ANSWER[: len(seen)]
    assert engine.info.in_flight == 0


async def test_reader_that_stops_after_the_last_chunk_does_not_abort(
    server: ScriptedEngine, engine: Engine
) -> None:
    call = chunks_of(engine, PROMPT, Sampling(max_tokens=9), request_id="r", stream=False)
    async with aclosing(call):
        assert (await anext(call)).finish_reason is FinishReason.STOP
    assert server.aborts == []


async def test_cancelled_reader_aborts_the_call(server: ScriptedEngine, engine: Engine) -> None:
    server.faults = [Fault("stall", after_tokens=1)]
    reader = asyncio.create_task(sample(engine, stream=True))
    await server.called.wait()
    await server.calls[0].began.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(server.calls[0].abort.wait(), 10)


async def test_answer_aborted_by_the_engine_is_cut(server: ScriptedEngine, engine: Engine) -> None:
    server.token_delay_s = 30.0
    reader = asyncio.create_task(sample(engine, stream=False))
    await server.called.wait()
    server.calls[0].abort.set()
    assert (await reader)[-1].finish_reason is FinishReason.CUT


async def test_check_updates_model_context_length_and_version(
    server: ScriptedEngine, engine: Engine
) -> None:
    server.version = 12
    await engine.check()
    info = engine.info
    assert (info.model, info.max_context_tokens) == ("scripted", 131_072)
    assert info.version == (0 if isinstance(engine, CompletionsEngine) else 12)
    server.healthy = False
    with pytest.raises(EngineError):
        await engine.check()
    assert not info.healthy


async def test_unreachable_engine_is_an_engine_error() -> None:
    engine = VllmEngine("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await engine.check()
    await engine.close()


async def test_scripted_engine_refuses_a_prompt_that_does_not_extend(
    server: ScriptedEngine, engine: Engine
) -> None:
    server.expect_extension = True
    await sample(engine, stream=False)
    with pytest.raises(RequestError, match="extends none"):
        await sample(engine, stream=False)
    extended = np.array([*PROMPT, *ANSWER, 99], np.int32)
    call = chunks_of(engine, extended, Sampling(max_tokens=9), request_id="r-3", cache_salt="s")
    assert [i async for c in call for i in c.ids] == ANSWER
    assert len(server.violations) == 1


@pytest.mark.parametrize("client", [VllmEngine, SglangEngine])
@pytest.mark.parametrize("status", [401, 403, 405])
async def test_engine_behind_a_gateway_that_hides_its_weight_version_is_healthy(
    client: type[Engine], status: int
) -> None:
    async with gateway({"/health": 200, "/v1/models": 404, "/metrics": status}, status) as url:
        engine = client(url)  # type: ignore[call-arg]
        await engine.check()
        assert engine.info.healthy
        await engine.close()


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_check_that_is_answered_with_a_refusal_is_a_failed_check(path: str) -> None:
    async with gateway({path: 400}, 200) as url:
        engine = VllmEngine(url)
        with pytest.raises(EngineError, match="answered 400"):
            await engine.check()
        assert not engine.info.healthy
        await engine.close()


@asynccontextmanager
async def gateway(statuses: dict[str, int], other: int) -> AsyncIterator[str]:
    """The URL of a server that answers each path with its status and without a body."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=statuses.get(request.path, other))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")
