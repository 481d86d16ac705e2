"""The vLLM client against a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from msgspec import structs

from proxy.engines.address import EngineAddress
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.upstream import Upstream
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmServer
from proxy.errors import EngineError, EngineRefusal, ProxyError, RequestError
from proxy.extras.binary_route.client import FramesClient
from proxy.extras.engines.completions import CompletionsEngine
from proxy.records import FinishReason
from tests.conftest import TINY_CONTEXT_TOKENS
from tests.proxy.pushed import chunks_of

pytestmark = pytest.mark.engine
PROMPT = np.arange(20, 60, dtype=np.int32)
ENDLESS = Sampling(max_tokens=1900, structured={"regex": "[ab]{4000}"})
"""With this grammar, the model cannot end its answer."""


@pytest.fixture(params=["frames", "json"])
async def engine(vllm: VllmServer, request: pytest.FixtureRequest) -> AsyncIterator[VllmEngine]:
    async with client_of(vllm, request.param) as client:
        yield client


@asynccontextmanager
async def client_of(vllm: VllmServer, route: str) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(vllm.url)
    await client.check()
    assert client._has_frames
    client._has_frames = route == "frames"
    yield client
    await client.close()


async def sample(engine: VllmEngine, sampling: Sampling, *, stream: bool = True) -> list[Chunk]:
    call = chunks_of(engine, PROMPT, sampling, request_id="r", cache_salt="s", stream=stream)
    return [chunk async for chunk in call]


def ids(chunks: list[Chunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.ids]


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


async def test_check_learns_model_and_context(engine: VllmEngine) -> None:
    assert engine.info.healthy
    assert engine.info.model == "tiny"
    assert engine.info.max_context_tokens == TINY_CONTEXT_TOKENS


async def test_streamed_and_whole_answers_are_the_same_sample(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.8, seed=7)
    streamed = await sample(engine, sampling)
    (whole,) = await sample(engine, sampling, stream=False)
    assert ids(streamed) == whole.ids
    np.testing.assert_allclose(logprobs(streamed), whole.logprobs, atol=1e-4)
    assert streamed[-1].finish_reason is whole.finish_reason is FinishReason.LENGTH
    (span,) = whole.versions
    assert (span.start, span.end) == (0, 24)
    assert streamed[-1].versions == whole.versions


@pytest.mark.parametrize("kind", [VllmEngine, CompletionsEngine])
async def test_alternatives_are_the_most_probable_tokens_and_change_no_request_of_the_agent(
    vllm: VllmServer, kind: type[VllmEngine | CompletionsEngine]
) -> None:
    client = kind(vllm.url)
    await client.check()
    wanted = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "top_logprobs": 2}

    async def sampled(**more: int) -> Chunk:
        sampling = Sampling(**{**wanted, **more})  # type: ignore[arg-type]
        call = chunks_of(client, PROMPT, sampling, request_id="r", stream=False)
        (chunk,) = [each async for each in call]
        return chunk

    alone, recorded = await sampled(), await sampled(alternatives=5)
    assert recorded.ids == alone.ids
    assert recorded.top_logprobs is not None
    assert alone.top_logprobs is not None
    for top, expected in zip(recorded.top_logprobs, alone.top_logprobs, strict=True):
        assert [token for token, _ in top] == [token for token, _ in expected]
    rows = recorded.alternatives
    assert rows is not None
    assert rows.shape == (12, 5)
    assert (np.diff(rows["logprob"]) <= 0).all()
    assert (np.exp(rows["logprob"]).sum(1) <= 1.001).all()
    (widest,) = [await sampled(alternatives=19)]
    assert widest.alternatives is not None
    np.testing.assert_allclose(widest.alternatives["logprob"][:, :5], rows["logprob"], atol=1e-3)
    for row, token, logprob in zip(rows, recorded.ids, recorded.logprobs, strict=True):
        known = dict(row.tolist())
        assert len(known) == 5
        assert known.get(token, logprob) == pytest.approx(logprob, abs=1e-4)
        assert token in known or logprob <= row["logprob"].min() + 1e-4
    await client.close()


async def test_refusal_of_too_many_alternatives_names_logprobs(engine: VllmEngine) -> None:
    """By this word the client knows it, and adds what to do (`HttpEngine.generate`)."""
    with pytest.raises(EngineRefusal, match="Requested sample logprobs of 24"):
        await sample(engine, Sampling(max_tokens=4, top_logprobs=24))


async def test_logprobs_are_those_of_the_sampled_distribution(engine: VllmEngine) -> None:
    """The probabilities of the two tokens that top_k keeps sum to one."""
    (whole,) = await sample(
        engine, Sampling(max_tokens=4, temperature=0.5, top_k=2, top_logprobs=2), stream=False
    )
    assert whole.top_logprobs is not None
    for chosen, alternatives in zip(whole.logprobs, whole.top_logprobs, strict=True):
        assert len(alternatives) == 2
        assert sum(np.exp(p) for _, p in alternatives) == pytest.approx(1.0, abs=1e-4)
        assert chosen == pytest.approx(alternatives[0][1])


async def test_stop_token_ends_the_answer_and_is_part_of_it(engine: VllmEngine) -> None:
    greedy = Sampling(max_tokens=8, temperature=0.0)
    (free,) = await sample(engine, greedy, stream=False)
    wanted = free.ids[2]
    stopping = Sampling(max_tokens=8, temperature=0.0, stop_token_ids=(wanted,))
    (stopped,) = await sample(engine, stopping, stream=False)
    assert stopped.ids == free.ids[: free.ids.index(wanted) + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.stop_reason == wanted


async def test_every_sampling_parameter_is_accepted(engine: VllmEngine) -> None:
    sampling = Sampling(
        max_tokens=16,
        temperature=0.9,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        seed=3,
        stop=("zzzz",),
        structured={"regex": "[ab]{3}"},
    )
    (whole,) = await sample(engine, sampling, stream=False)
    assert whole.finish_reason is FinishReason.STOP


async def test_prompt_longer_than_the_context_is_a_request_error(engine: VllmEngine) -> None:
    prompt = np.ones(TINY_CONTEXT_TOKENS + 1, np.int32)
    call = chunks_of(engine, prompt, Sampling(max_tokens=1), request_id="r")
    with pytest.raises(RequestError, match=str(TINY_CONTEXT_TOKENS)):
        await anext(call)


async def test_closed_call_is_aborted_and_the_engine_continues(engine: VllmEngine) -> None:
    async with aclosing(chunks_of(engine, PROMPT, ENDLESS, request_id="gone")) as generation:
        await anext(generation)
    assert engine.info.in_flight == 0
    assert len(ids(await sample(engine, Sampling(max_tokens=3)))) == 3


async def test_aborted_call_is_cut(engine: VllmEngine) -> None:
    chunks: list[Chunk] = []
    async for chunk in chunks_of(engine, PROMPT, ENDLESS, request_id="gone"):
        if not chunks:
            await engine.abort("gone")
        chunks.append(chunk)
    assert chunks[-1].finish_reason is FinishReason.CUT
    assert len(ids(chunks)) < 1900


async def test_concurrent_calls_get_their_own_answers(engine: VllmEngine) -> None:
    greedy = Sampling(max_tokens=8, temperature=0.0)
    alone = ids(await sample(engine, greedy))
    together = await asyncio.gather(*(sample(engine, greedy) for _ in range(16)))
    assert all(ids(chunks) == alone for chunks in together)


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_route_gives_the_same_sample(
    vllm: VllmServer, engine: VllmEngine, stream: bool
) -> None:
    portable = CompletionsEngine(vllm.url)
    await portable.check()
    sampling = Sampling(max_tokens=12, temperature=0.8, seed=11, top_logprobs=2)
    (expected,) = await sample(engine, sampling, stream=False)
    call = chunks_of(portable, PROMPT, sampling, request_id="r", stream=stream)
    chunks = [chunk async for chunk in call]
    assert ids(chunks) == expected.ids
    np.testing.assert_allclose(logprobs(chunks), expected.logprobs, atol=1e-4)
    assert chunks[-1].finish_reason is expected.finish_reason
    assert portable.info.max_context_tokens == TINY_CONTEXT_TOKENS
    await portable.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_both_routes_give_the_same_answers_and_refusals(
    vllm: VllmServer, stream: bool
) -> None:
    plain = Sampling(max_tokens=12, temperature=0.8, seed=11)
    wanted = [
        plain,
        structs.replace(plain, alternatives=4, top_logprobs=3),
        structs.replace(plain, stop=("a", "e")),
        structs.replace(plain, structured={"regex": "[ab]{3}"}),
        structs.replace(plain, top_p=1.5),
        structs.replace(plain, top_logprobs=24),
        structs.replace(plain, structured={"regex": "["}),
        structs.replace(plain, adapter="policy@3"),
    ]

    async def answer(engine: VllmEngine, sampling: Sampling) -> str:
        try:
            chunks = await sample(engine, sampling, stream=stream)
        except ProxyError as error:
            return f"{type(error).__name__} {error.message}"
        return repr((ids(chunks), logprobs(chunks), chunks[-1].finish_reason, chunks[-1].versions))

    # Alone each, because an engine computes other numbers in another batch.
    async with client_of(vllm, "frames") as frames, client_of(vllm, "json") as json:
        answers = [(await answer(frames, each), await answer(json, each)) for each in wanted]
    assert [by_frames for by_frames, _ in answers] == [by_json for _, by_json in answers]
    kinds = [by_frames.split()[0] for by_frames, _ in answers[-4:]]
    assert kinds == ["EngineRefusal", "EngineRefusal", "EngineRefusal", "MissingAdapter"]


async def test_conversation_that_is_sent_in_parts_has_the_answers_of_whole_prompts(
    vllm: VllmServer,
) -> None:
    path = np.arange(TINY_CONTEXT_TOKENS - 40, dtype=np.int32) % 90 + 20

    async def answers(engine: VllmEngine) -> list[str]:
        out = []
        for turn, tokens in enumerate(range(1100, len(path), 100)):
            call = chunks_of(
                *(engine, path[:tokens], Sampling(max_tokens=8, temperature=0.0)),
                request_id=f"s#{turn}",
                cache_salt=str(id(engine)),
                stream=False,
            )
            (chunk,) = [each async for each in call]
            out.append(repr((chunk.ids, chunk.logprobs)))
        return out

    async with client_of(vllm, "frames") as frames, client_of(vllm, "json") as json:
        assert await answers(frames) == await answers(json)
        assert frames._frames._connection is not None
        assert len(frames._frames._connection.sent) > 0


async def test_calls_of_a_lost_connection_are_aborted(vllm: VllmServer) -> None:
    async with client_of(vllm, "frames") as engine, client_of(vllm, "json") as observer:
        running = asyncio.create_task(sample(engine, ENDLESS))
        await reaches(observer, 1.0)
        await engine._frames.close()
        with pytest.raises(EngineError, match="closed the connection"):
            await running
        await reaches(observer, 0.0)


async def reaches(observer: VllmEngine, requests: float) -> None:
    """Waits until the engine samples so many requests."""
    async with asyncio.timeout(30):
        while requests not in await _running_requests(observer):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _running_requests(observer: VllmEngine) -> list[float]:
    lines = (await observer._upstream.text("/metrics", timeout_s=10.0)).splitlines()
    return [float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running")]


async def test_binary_route_needs_the_key(vllm: VllmServer) -> None:
    address = EngineAddress.parse(vllm.url)
    for key in (None, "wrong"):
        stranger = FramesClient(EngineAddress(address.url, key))
        assert not await stranger.connect()
        await stranger.close()


@pytest.mark.parametrize("path", ["/weight_info", "/v1/models", "/pause", "/update_weights"])
async def test_our_vllm_refuses_requests_without_its_key(vllm: VllmServer, path: str) -> None:
    upstream = Upstream(EngineAddress.parse(vllm.url).url)
    with pytest.raises(EngineError, match="401"):
        await upstream.post(path, b"{}", timeout_s=10.0)
    await upstream.close()
    assert vllm.url_file.read_text().strip() == vllm.url
    assert vllm.url_file.stat().st_mode & 0o777 == 0o600
