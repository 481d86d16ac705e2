"""Answers of several policies on the same engines: each token is from its own policy's adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engines.protocol import Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError, RequestError
from proxy.extras.engines.sglang import SglangEngine
from proxy.records import ServedPolicy, VersionSpan
from proxy.routing.generation import Cause, Generation, Seam
from proxy.routing.policies import Policies
from proxy.routing.router import Router
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from tests.proxy.pushed import pieces_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER_TOKENS = 12
BASE_TOKEN = 99
NAMES = ("planner", "coder")
VERSIONS = range(1, 6)


def token_of(served: ServedPolicy) -> int:
    """The only token that the adapter samples, so that each token names its adapter."""
    return 100 * (1 + NAMES.index(served.name)) + served.version


def policy_at(name: str, version: int) -> ServedPolicy:
    return ServedPolicy(name, version, f"{name}@{version}.aa")


class Sampled:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.seams: list[Seam] = []
        self.versions: tuple[VersionSpan, ...] = ()

    async def take(self, generation: Generation) -> None:
        async with aclosing(pieces_of(generation)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Seam):
                    self.seams.append(piece)
                else:
                    self.ids += piece.ids
        self.versions = generation.versions


class Replicas:
    """Two engines that serve every version of both policies, and the router before them."""

    def __init__(self, servers: list[ScriptedEngine], router: Router) -> None:
        self.servers = servers
        self.router = router
        self._number = 0

    def generation(self, policy: str, **more: Any) -> Generation:
        self._number += 1
        sampling = Sampling(max_tokens=ANSWER_TOKENS, policy=policy, trained=True, **more)
        return Generation(
            self.router,
            PROMPT,
            sampling,
            request_id=f"s#{self._number}",
            session_id=f"s{self._number % 3}",
        )


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def start_replicas(stack: AsyncExitStack, *, count: int = 2, checks: bool = True) -> Replicas:
    """`checks`: whether the router repeats its health checks."""
    servers = []
    for _ in range(count):
        server = ScriptedEngine(lambda _: [BASE_TOKEN] * 50, token_delay_s=0.002)
        for served in (policy_at(name, version) for name in NAMES for version in VERSIONS):
            token = token_of(served)
            server.adapters[served.adapter] = lambda _, token=token: [token] * 50  # type: ignore[misc]
        servers.append(await stack.enter_async_context(server))
    engines = [VllmEngine(server.url, name=str(n)) for n, server in enumerate(servers)]
    router = Router(engines, check_interval_s=0.02, patience_s=5.0, vocab_size=1000)
    await (router.start() if checks else router.check())
    stack.push_async_callback(router.close)
    return Replicas(servers, router)


def assert_own_tokens(sampled: Sampled, policy: str) -> None:
    """Every token is from the policy's own adapter, of the version that its span has."""
    assert len(sampled.ids) == ANSWER_TOKENS
    spans = sampled.versions
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == ANSWER_TOKENS
    expected = [
        token_of(policy_at(policy, span.version))
        for span in spans
        for _ in range(span.start, span.end)
    ]
    assert sampled.ids == expected


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
async def test_no_answer_ever_has_a_token_of_another_adapter(
    data: st.DataObject, stack: AsyncExitStack
) -> None:
    """Calls of two policies at once, while both get new versions and engines fail."""
    asked = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6))
    events = data.draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VERSIONS)), max_size=8)
    )
    kinds = data.draw(st.lists(st.sampled_from(["die", "error", "abort"]), max_size=3))
    async with AsyncExitStack() as own:
        replicas = await start_replicas(own)
        for name in NAMES:
            await replicas.router.publish(policy_at(name, 1))
        for kind, server in zip(kinds, replicas.servers * 2, strict=False):
            server.faults.append(Fault(kind, after_tokens=4))  # type: ignore[arg-type]
        results = [Sampled() for _ in asked]
        async with asyncio.TaskGroup() as running:
            for sampled, policy in zip(results, asked, strict=True):
                running.create_task(sampled.take(replicas.generation(policy)))
            for name, version in events:
                await asyncio.sleep(0.004)
                await replicas.router.publish(policy_at(name, version))
    for sampled, policy in zip(results, asked, strict=True):
        assert_own_tokens(sampled, policy)


async def test_running_answer_continues_with_the_new_version(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1)
    server = replicas.servers[0]
    server.token_delay_s = 30.0
    await replicas.router.publish(policy_at("planner", 1))
    sampled = Sampled()
    task = asyncio.create_task(sampled.take(replicas.generation("planner")))
    await server.called.wait()
    first = server.calls[0]
    server.token_delay_s = 0.0
    await replicas.router.publish(policy_at("planner", 2))
    await task
    assert_own_tokens(sampled, "planner")
    assert server.aborts == [first.request_id]
    assert sampled.versions[-1].version == 2
    assert server.calls[1].prompt_ids == [*PROMPT.tolist(), *first.answer_ids]
    assert [seam.cause for seam in sampled.seams] == [Cause.UPDATED] * bool(first.answer_ids)


async def test_other_policies_and_the_engines_weights_are_not_interrupted(
    stack: AsyncExitStack,
) -> None:
    replicas = await start_replicas(stack, count=1)
    for name in NAMES:
        await replicas.router.publish(policy_at(name, 1))
    results = {policy: Sampled() for policy in ("coder", "")}
    tasks = [
        asyncio.create_task(sampled.take(replicas.generation(policy)))
        for policy, sampled in results.items()
    ]
    await replicas.servers[0].called.wait()
    await replicas.router.publish(policy_at("planner", 2))
    await asyncio.gather(*tasks)
    assert replicas.servers[0].aborts == []
    assert_own_tokens(results["coder"], "coder")
    assert results[""].ids == [BASE_TOKEN] * ANSWER_TOKENS


async def test_answer_with_a_grammar_keeps_its_version(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1)
    await replicas.router.publish(policy_at("planner", 1))
    sampled = Sampled()
    generation = replicas.generation("planner", structured={"regex": "a*"})
    task = asyncio.create_task(sampled.take(generation))
    await replicas.servers[0].called.wait()
    await replicas.router.publish(policy_at("planner", 2))
    await task
    assert sampled.versions == (VersionSpan(1, 0, ANSWER_TOKENS),)
    assert_own_tokens(sampled, "planner")


async def test_call_waits_for_a_policy_that_is_not_published(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack)
    sampled = Sampled()
    task = asyncio.create_task(sampled.take(replicas.generation("coder")))
    await asyncio.sleep(0)
    assert not task.done()
    await replicas.router.publish(policy_at("coder", 4))
    await task
    assert_own_tokens(sampled, "coder")


async def test_policy_that_is_never_published_is_refused_by_name(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack)
    replicas.router._patience_s = 0.01
    with pytest.raises(EngineError, match="policy 'coder' has no version yet"):
        await Sampled().take(replicas.generation("coder"))


async def test_engine_that_lost_an_adapter_serves_its_other_calls(stack: AsyncExitStack) -> None:
    """As after a restart of the engine, if the proxy still has the policy in its store."""
    replicas = await start_replicas(stack, count=1, checks=False)
    await replicas.router.publish(policy_at("planner", 1))
    (server,) = replicas.servers
    del server.adapters[policy_at("planner", 1).adapter]
    lost, base = replicas.generation("planner"), replicas.generation("")
    running = asyncio.create_task((sampled := Sampled()).take(base))
    await server.called.wait()
    with pytest.raises(EngineError, match="this version of the policy 'planner'") as failed:
        await Sampled().take(lost)
    assert failed.value.status == 502
    assert [info.healthy for info in replicas.router.infos] == [True]
    await running
    assert sampled.ids == [BASE_TOKEN] * ANSWER_TOKENS


@pytest.mark.parametrize("stream", [True, False])
async def test_another_engine_answers_a_call_whose_adapter_one_has_lost(
    stack: AsyncExitStack, stream: bool
) -> None:
    replicas = await start_replicas(stack, checks=False)
    await replicas.router.publish(policy_at("planner", 1))
    del replicas.servers[0].adapters[policy_at("planner", 1).adapter]
    for _ in range(2):
        sampling = Sampling(max_tokens=ANSWER_TOKENS, policy="planner", trained=True)
        call = Generation(
            replicas.router, PROMPT, sampling, request_id="s#1", session_id="s", stream=stream
        )
        await (sampled := Sampled()).take(call)
        assert_own_tokens(sampled, "planner")
        assert [info.healthy for info in replicas.router.infos] == [True, True]


async def test_engines_without_adapters_are_refused_by_name() -> None:
    router = Router([SglangEngine("http://127.0.0.1:9", name="sglang")])
    await router.publish(policy_at("planner", 1))
    generation = Generation(
        router,
        PROMPT,
        Sampling(max_tokens=5, policy="planner"),
        request_id="s#0",
        session_id="s",
    )
    with pytest.raises(RequestError, match="policy 'planner', and no engine serves adapters"):
        await Sampled().take(generation)
    await router.close()


def test_running_calls_of_another_version_are_the_outdated_ones() -> None:
    policies, engine = Policies(), VllmEngine("http://127.0.0.1:9")
    assert policies.publish(policy_at("planner", 1)) == []
    first = policies.current("planner")
    assert first is not None
    with policies.running(first, engine, "s#0"):
        assert policies.publish(policy_at("coder", 1)) == []
        assert policies.publish(policy_at("planner", 1)) == []
        assert policies.publish(policy_at("planner", 2)) == [(engine, "s#0")]
    assert policies.publish(policy_at("planner", 3)) == []
    assert [each.version for each in policies.published] == [1, 3]
