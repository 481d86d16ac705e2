"""Generations over the relay are exact, streamed and bounded, and survive network failures."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from proxy.engines.protocol import Sampling
from proxy.errors import EngineError
from proxy.extras.relay.protocol import Taken, ToWorker
from proxy.records import FinishReason, VersionSpan
from proxy.testing.scripted_engine import ScriptedEngine, scripted_logprob
from tests.proxy.extras.relay.conftest import (
    ANSWER,
    PROMPT,
    TOKEN,
    OpenProxy,
    StartWorker,
    ids_of,
    sample,
    write_model,
)


@pytest.mark.parametrize("stream", [True, False])
async def test_relay_returns_exactly_what_the_workers_engine_sampled(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine, stream: bool
) -> None:
    server.version = 3
    proxy = await open_proxy()
    await start_worker(proxy)
    engine = await proxy.worker()
    chunks = [chunk async for chunk in sample(engine, stream=stream, temperature=0.5)]
    assert [i for c in chunks for i in c.ids] == ANSWER
    expected = [scripted_logprob(a, b) for a, b in zip([13, *ANSWER], ANSWER, strict=False)]
    assert [p for c in chunks for p in c.logprobs] == expected
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].versions == (VersionSpan(3, 0, len(ANSWER)),)
    (call,) = server.calls
    assert (call.prompt_ids, call.cache_salt, call.stream) == ([11, 12, 13], "s", stream)
    assert call.sampling["temperature"] == 0.5
    assert engine.info.in_flight == 0
    assert (engine.info.model, engine.info.max_context_tokens) == ("scripted", 131_072)


async def test_tokens_arrive_as_they_are_sampled(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy()
    await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.02
    async for chunk in sample(engine):
        first = chunk.ids
        break
    assert first == ANSWER[: len(first)]
    assert server.calls[0].finish_reason is None


async def test_reader_that_leaves_aborts_the_generation(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy()
    await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.02
    async with contextlib.aclosing(sample(engine)) as chunks:  # type: ignore[type-var]
        await anext(chunks)
    async with asyncio.timeout(10):
        await server.calls[0].abort.wait()
    assert engine.info.in_flight == 0


async def test_worker_sends_no_more_frames_than_the_proxy_has_room_for(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy(window=2)
    await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.001
    held: list[ToWorker] = []
    post = engine._post
    engine._post = lambda message: (held.append if isinstance(message, Taken) else post)(message)  # type: ignore[method-assign]
    read: list[int] = []
    call = asyncio.create_task(
        engine.generate(
            PROMPT, Sampling(max_tokens=100), lambda chunk: read.extend(chunk.ids), request_id="r"
        )
    )
    async with asyncio.timeout(20):
        await server.called.wait()
        while server.calls[0].finish_reason is None:
            await engine.probe()
    await engine.probe()
    assert len(held) == 2
    engine._post = post  # type: ignore[method-assign]
    for message in held:
        post(message)
    await call
    assert read == ANSWER


async def test_call_goes_on_after_a_reconnect_that_has_lost_acknowledgements(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy(window=2, grace_s=60)
    await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.001
    lost = asyncio.Event()
    post = engine._post

    def lose(message: ToWorker) -> None:
        if not isinstance(message, Taken):
            post(message)
        elif message.number == 2:
            lost.set()

    engine._post = lose  # type: ignore[method-assign]
    read: list[int] = []
    call = asyncio.create_task(
        engine.generate(
            PROMPT, Sampling(max_tokens=100), lambda chunk: read.extend(chunk.ids), request_id="r"
        )
    )
    async with asyncio.timeout(20):
        await lost.wait()
        engine._post = post  # type: ignore[method-assign]
        engine._connection._socket._req.transport.abort()
        await call
    assert read == ANSWER


async def test_failure_of_the_engine_fails_the_call(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy()
    await start_worker(proxy)
    engine = await proxy.worker()
    server.healthy = False
    with pytest.raises(EngineError, match="gpu-0"):
        await engine.check()
    await server.close()
    with pytest.raises(EngineError):
        await ids_of(sample(engine))


async def test_call_beyond_the_workers_limit_is_refused(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy()
    await start_worker(proxy, "--max-calls", "1")
    engine = await proxy.worker()
    server.token_delay_s = 0.02
    async with contextlib.aclosing(sample(engine)) as first:  # type: ignore[type-var]
        await anext(first)
        with pytest.raises(EngineError, match="1 calls are in flight"):
            await ids_of(sample(engine, request_id="r-2"))


async def test_call_is_cut_if_its_worker_is_killed(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy(grace_s=0.2)
    worker = await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.02
    chunks = sample(engine)
    await anext(chunks)
    worker.signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="did not reconnect within"):
        await ids_of(chunks)
    assert await proxy.left.get() == engine.info.name
    with pytest.raises(EngineError, match="is gone"):
        await ids_of(sample(engine))


async def test_restarted_worker_takes_over_its_name_and_old_calls_are_cut(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy(grace_s=60)
    worker = await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.02
    chunks = sample(engine)
    await anext(chunks)
    worker.signal(signal.SIGKILL)
    await worker.process.wait()
    await start_worker(proxy)
    with pytest.raises(EngineError, match="another process took over its name"):
        await ids_of(chunks)
    server.token_delay_s = 0.0
    assert await ids_of(sample(await proxy.worker())) == ANSWER
    assert [call.finish_reason for call in server.calls] == ["abort", "stop"]


async def test_stopped_worker_finishes_its_calls_and_accepts_no_more(
    open_proxy: OpenProxy, start_worker: StartWorker, server: ScriptedEngine
) -> None:
    proxy = await open_proxy()
    worker = await start_worker(proxy)
    engine = await proxy.worker()
    server.token_delay_s = 0.01
    read: list[int] = []
    async for chunk in sample(engine):
        if not read:
            worker.signal(signal.SIGTERM)
        read += chunk.ids
    assert read == ANSWER
    assert await proxy.left.get() == engine.info.name
    assert await worker.process.wait() == 0


async def test_second_worker_with_the_same_name_is_refused(
    open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    proxy = await open_proxy()
    await start_worker(proxy)
    engine = await proxy.worker()
    second = await start_worker(proxy)
    assert (
        "a worker named 'gpu-0' is connected; give each worker its own --name"
        in await second.ended()
    )
    assert await ids_of(sample(engine)) == ANSWER


async def test_several_workers_serve_concurrently(
    open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    proxy = await open_proxy()
    for name in ("gpu-0", "gpu-1"):
        await start_worker(proxy, name=name)
    engines = [await proxy.worker(), await proxy.worker()]
    assert {engine.info.name for engine in engines} == {"gpu-0", "gpu-1"}
    answers = await asyncio.gather(*(ids_of(sample(engine)) for engine in engines))
    assert answers == [ANSWER, ANSWER]


async def test_wrong_token_is_refused_before_the_handshake(
    open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    proxy = await open_proxy()
    worker = await start_worker(proxy, token="another")
    assert "401" in await worker.ended()
    assert proxy.joined.empty()


async def test_another_model_is_refused_at_the_handshake(
    open_proxy: OpenProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    proxy = await open_proxy()
    other = write_model(tmp_path / "other", {"a": 0, "b": 1})
    worker = await start_worker(proxy, model=other)
    assert "has another model than the proxy: its tokenizer is" in await worker.ended()
    assert proxy.joined.empty()


async def test_worker_with_a_wrong_setting_reports_its_flag_and_variable(
    open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    worker = await start_worker(await open_proxy(), "--proxy", "http://wrong")
    assert (await worker.ended()).startswith(
        "agentic-worker: --proxy or AGENTIC_WORKER_PROXY: String should match pattern"
    )


async def test_worker_without_a_token_reports_how_to_give_it(
    open_proxy: OpenProxy, start_worker: StartWorker
) -> None:
    worker = await start_worker(await open_proxy(), token=None)
    assert (await worker.ended()).strip() == (
        "agentic-worker: --token-file or AGENTIC_WORKER_TOKEN: Field required"
    )


async def test_worker_reads_its_token_from_a_file(
    open_proxy: OpenProxy, start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    proxy = await open_proxy()
    await start_worker(proxy, "--token-file", str(tmp_path / "token"), token=None)
    assert (await proxy.worker()).info.name == "gpu-0"
