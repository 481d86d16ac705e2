"""An answer whose engines fail at every token: the answer is that of an undisturbed engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError
from proxy.extras.engines.completions import CompletionsEngine
from proxy.extras.engines.sglang import SglangEngine
from proxy.records import FinishReason, VersionSpan
from proxy.routing.generation import Cause, Generation, GenerationState, Seam, seed_after
from proxy.routing.router import Router
from proxy.testing.scripted_engine import Fault, ScriptedEngine, scripted_logprob
from tests.proxy.pushed import pieces_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [*range(100, 110), 2]
STOP = (2,)
WIRES: dict[str, type[VllmEngine | CompletionsEngine | SglangEngine]] = {
    "vllm": VllmEngine,
    "completions": CompletionsEngine,
    "sglang": SglangEngine,
}
KINDS = ["die", "error", "abort", "nonsense"]
CAUSES = {"nonsense": Cause.UNUSABLE, "abort": Cause.CUT}


def continue_answer(prompt_ids: list[int]) -> list[int]:
    """Deterministic: what is left of the answer after the part of it that ends the prompt."""
    return ANSWER[len(prompt_ids) - len(PROMPT) :]


@dataclass
class Sampled:
    """What a generation gave."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seams: list[Seam] = field(default_factory=list)
    finish: FinishReason | None = None
    finishes: int = 0

    async def take(self, generation: Generation) -> None:
        async with aclosing(pieces_of(generation)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Seam):
                    self.seams.append(piece)
                    continue
                self.ids += piece.ids
                self.logprobs += piece.logprobs
                self.finishes += piece.finish_reason is not None
                self.finish = piece.finish_reason


class Replicas:
    """Servers `0` and `1`, and the router before them."""

    def __init__(self, servers: list[ScriptedEngine], router: Router) -> None:
        self.servers = servers
        self.router = router
        self.failed = asyncio.Event()

    def generation(self, **sampling: object) -> Generation:
        wanted = {"max_tokens": 50, "stop_token_ids": STOP, **sampling}
        return Generation(
            self.router,
            PROMPT,
            Sampling(**wanted),  # type: ignore[arg-type]
            request_id="s#0",
            session_id="s",
        )

    async def sample(self, **sampling: object) -> Sampled:
        sampled = Sampled()
        await sampled.take(self.generation(**sampling))
        return sampled

    @property
    def asked(self) -> list[list[int]]:
        """The prompts, in the order in which servers were asked: first 0, then 1."""
        return [call.prompt_ids for server in self.servers for call in server.calls]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def start_replicas(
    stack: AsyncExitStack, *, wire: str = "vllm", count: int = 2, patience_s: float = 10.0
) -> Replicas:
    servers = [
        await stack.enter_async_context(ScriptedEngine(continue_answer)) for _ in range(count)
    ]
    engines = [WIRES[wire](server.url, name=str(n)) for n, server in enumerate(servers)]
    router = Router(
        engines,
        check_interval_s=0.05,
        patience_s=patience_s,
        vocab_size=1000,
        on_failure=lambda *_: replicas.failed.set(),
    )
    replicas = Replicas(servers, router)
    await router.start()
    stack.push_async_callback(router.close)
    return replicas


def assert_whole(sampled: Sampled) -> None:
    assert sampled.ids == ANSWER
    before = [PROMPT[-1], *ANSWER]
    assert sampled.logprobs == [
        scripted_logprob(a, b) for a, b in zip(before, ANSWER, strict=False)
    ]
    assert (sampled.finish, sampled.finishes) == (FinishReason.STOP, 1)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", KINDS)
async def test_answer_broken_at_any_token_is_that_of_an_undisturbed_engine(
    wire: str, kind: str, stack: AsyncExitStack
) -> None:
    replicas = await start_replicas(stack, wire=wire)
    first, second = replicas.servers
    for tokens in range(1, len(ANSWER)):
        first.calls.clear()
        second.calls.clear()
        first.faults = [Fault(kind, after_tokens=tokens)]  # type: ignore[arg-type]
        replicas.router.infos[0].healthy = True
        replicas.router._homes.clear()
        sampled = await replicas.sample()
        assert_whole(sampled)
        assert sampled.seams == [Seam(tokens, "0", "1", CAUSES.get(kind, Cause.LOST))]
        assert replicas.asked == [PROMPT.tolist(), [*PROMPT, *ANSWER[:tokens]]]
        limits = [int(call.sampling["max_tokens"]) for call in (first.calls + second.calls)]
        assert limits == [50, 50 - tokens]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(breaks=st.lists(st.tuples(st.sampled_from(["die", "error", "abort"]), st.integers(0, 6))))
def test_answer_broken_many_times_is_that_of_an_undisturbed_engine(
    breaks: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            replicas = await start_replicas(stack, count=1)
            faults = [Fault(kind, tokens) for kind, tokens in breaks[:4]]  # type: ignore[arg-type]
            (server,) = replicas.servers
            server.faults = list(faults)
            sampled = await replicas.sample()
            assert_whole(sampled)
            done = 0
            for call in server.calls:
                assert call.prompt_ids == [*PROMPT, *ANSWER[:done]]
                assert call.sampling["max_tokens"] == 50 - done
                done += len(call.answer_ids)
            assert len({call.request_id for call in server.calls}) == len(server.calls)

    asyncio.run(run())


async def test_answer_goes_on_at_its_own_engine_when_it_is_back(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1)
    (server,) = replicas.servers
    server.token_delay_s = 0.01
    port = int(server.url.rsplit(":", 1)[1])
    call = asyncio.create_task(replicas.sample())
    await server.called.wait()
    await server.calls[0].began.wait()
    await server.close()
    assert replicas.router.infos[0].in_flight in (0, 1)
    await server.start(port=port)
    sampled = await call
    assert_whole(sampled)
    assert len(sampled.seams) == 1


async def test_answer_without_an_engine_waits_for_one_that_is_added(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1)
    (server,) = replicas.servers
    await replicas.router.remove("0")
    call = asyncio.create_task(replicas.sample())
    await asyncio.sleep(0)
    await replicas.router.add(VllmEngine(server.url, name="replacement"))
    assert_whole(await call)


async def test_answer_goes_on_at_an_engine_that_is_healthy_before_it_is_checked(
    stack: AsyncExitStack,
) -> None:
    """As a relay worker is that connects again."""
    server = await stack.enter_async_context(ScriptedEngine(continue_answer))
    server.faults = [Fault("die", after_tokens=3)]
    failed = asyncio.Event()
    router = Router([VllmEngine(server.url)], on_failure=lambda *_: failed.set())
    stack.push_async_callback(router.close)
    call = asyncio.create_task(Replicas([server], router).sample())
    await failed.wait()
    await asyncio.wait([call], timeout=0.3)  # it has looked for another replica by now
    router.infos[0].healthy = True
    assert_whole(await call)


async def test_answer_goes_on_at_the_engine_that_replaces_its_own(stack: AsyncExitStack) -> None:
    """As the trainer does it: the dead engine is removed, and another has its name."""
    replicas = await start_replicas(stack, count=1)
    dead = replicas.servers[0]
    dead.token_delay_s = 0.01
    call = asyncio.create_task(replicas.sample())
    await dead.called.wait()
    await dead.calls[0].began.wait()
    await dead.close()
    await replicas.router.remove("0")
    new = await stack.enter_async_context(ScriptedEngine(continue_answer))
    await replicas.router.add(VllmEngine(new.url, name="0"))
    sampled = await call
    assert_whole(sampled)
    assert len(sampled.seams) == 1


@pytest.mark.parametrize("tokens", [0, 3])
async def test_patience_ends_with_a_retryable_error(tokens: int, stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1, patience_s=0.2)
    (server,) = replicas.servers
    server.faults = [Fault("die", after_tokens=tokens)] * 100
    server.healthy = False
    sampled = Sampled()
    with pytest.raises(EngineError, match="engine_patience_s") as ended:
        await sampled.take(replicas.generation())
    assert ended.value.status == 503
    assert ended.value.retry_after_s
    assert server.url not in ended.value.message
    assert sampled.ids == ANSWER[:tokens]


async def test_time_in_which_engines_are_paused_does_not_count(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1, patience_s=0.3)
    (server,) = replicas.servers
    server.faults = [Fault("die", after_tokens=3)]
    call = asyncio.create_task(replicas.sample())
    await server.called.wait()
    replicas.router.pause()
    await asyncio.wait([call], timeout=0.6)
    assert not call.done()
    replicas.router.resume()
    assert_whole(await call)


async def test_reader_that_leaves_while_it_waits_leaves_nothing_behind(
    stack: AsyncExitStack,
) -> None:
    replicas = await start_replicas(stack, count=1)
    (server,) = replicas.servers
    server.faults = [Fault("die", after_tokens=3)]
    server.healthy = False
    before = asyncio.all_tasks()
    generation, sampled = replicas.generation(), Sampled()
    call = asyncio.create_task(sampled.take(generation))
    await replicas.failed.wait()
    assert generation.state is GenerationState.WAITING
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert sampled.ids == ANSWER[:3]
    assert replicas.router.infos[0].in_flight == 0
    assert generation.versions == (VersionSpan(0, 0, 3),)
    assert {task for task in asyncio.all_tasks() - before if "sample" in repr(task)} == set()


async def test_engine_whose_answer_is_unusable_is_not_asked_again(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack, count=1)
    (server,) = replicas.servers
    server.faults = [Fault("nonsense", after_tokens=3)]
    with pytest.raises(EngineError) as ended:
        await replicas.sample()
    assert ended.value.status == 502
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured": {"regex": "a*"}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_answer_that_cannot_be_continued_exactly_is_cut(
    sampling: dict[str, object], stack: AsyncExitStack
) -> None:
    replicas = await start_replicas(stack)
    replicas.servers[0].faults = [Fault("die", after_tokens=3)]
    with pytest.raises(EngineError, match="cannot be continued exactly") as ended:
        await replicas.sample(**sampling)
    assert (ended.value.status, ended.value.retry_after_s) == (503, 1.0)
    assert replicas.servers[1].calls == []
    replicas.servers[1].faults = [Fault("die", after_tokens=0)]
    replicas.router.infos[0].healthy = True
    assert_whole(await replicas.sample(**sampling))


async def test_seed_of_a_continued_answer_depends_on_seed_and_place(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack)
    replicas.servers[0].faults = [Fault("die", after_tokens=3)]
    await replicas.sample(seed=7)
    seeds = [server.calls[0].sampling["seed"] for server in replicas.servers]
    assert seeds == [7, seed_after(7, 3)]
    assert "extra_args" not in replicas.servers[0].calls[0].sampling
    assert replicas.servers[1].calls[0].sampling["extra_args"] == {"first_seed": 7}
    assert len({7, *(seed_after(7, tokens) for tokens in range(100))}) == 101


async def test_other_parameters_are_the_same_for_every_call(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack)
    replicas.servers[0].faults = [Fault("die", after_tokens=3)]
    await replicas.sample(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("zz",))
    first, second = (server.calls[0].sampling for server in replicas.servers)
    assert first.pop("max_tokens") == second.pop("max_tokens") + 3
    assert first == second


@pytest.mark.parametrize(
    ("max_tokens", "finish"), [(len(ANSWER), FinishReason.STOP), (4, FinishReason.LENGTH)]
)
async def test_answer_that_was_whole_when_its_engine_died_is_not_continued(
    max_tokens: int, finish: FinishReason, stack: AsyncExitStack
) -> None:
    replicas = await start_replicas(stack)
    replicas.servers[0].faults = [Fault("die", after_tokens=max_tokens)]
    sampled = await replicas.sample(max_tokens=max_tokens)
    assert sampled.ids == ANSWER[:max_tokens]
    assert (sampled.finish, sampled.finishes) == (finish, 1)
    assert replicas.servers[1].calls == []


@pytest.mark.parametrize("version", [0, 4])
async def test_every_token_has_the_version_that_sampled_it(
    version: int, stack: AsyncExitStack
) -> None:
    replicas = await start_replicas(stack)
    first, second = replicas.servers
    first.version, second.version = version, 5
    await replicas.router.check()
    first.faults = [Fault("die", after_tokens=3)]
    generation = replicas.generation()
    await Sampled().take(generation)
    assert generation.versions == (VersionSpan(version, 0, 3), VersionSpan(5, 3, len(ANSWER)))


async def test_update_of_the_weights_in_the_second_call_is_in_the_versions(
    stack: AsyncExitStack,
) -> None:
    replicas = await start_replicas(stack)
    first, second = replicas.servers
    first.version, second.version = 4, 4
    await replicas.router.check()
    first.faults, second.token_delay_s = [Fault("die", after_tokens=3)], 0.01
    generation, sampled = replicas.generation(), Sampled()
    call = asyncio.create_task(sampled.take(generation))
    await second.called.wait()
    await second.calls[0].began.wait()
    second.version = 5
    await call
    at = 3 + second.calls[0].versions.index(5)
    assert generation.versions == (VersionSpan(4, 0, at), VersionSpan(5, at, len(ANSWER)))


async def test_answer_that_is_not_streamed_is_sampled_again(stack: AsyncExitStack) -> None:
    replicas = await start_replicas(stack)
    replicas.servers[0].faults = [Fault("die", after_tokens=3)]
    sampling = Sampling(max_tokens=50, stop_token_ids=STOP)
    generation = Generation(
        replicas.router, PROMPT, sampling, request_id="s#0", session_id="s", stream=False
    )
    chunks = [piece async for piece in pieces_of(generation) if isinstance(piece, Chunk)]
    assert [chunk.ids for chunk in chunks] == [ANSWER]
    assert replicas.asked == [PROMPT.tolist()] * 2
