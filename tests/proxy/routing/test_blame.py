"""Requests that kill the engines that sample them, among requests that do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import RequestError
from proxy.routing import blame
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from proxy.testing.scripted_engine import Fault, ScriptedEngine

POISON = 666
TOKENS = 20
ANSWER = [*range(100, 100 + TOKENS - 1), 2]


class Engines:
    """Scripted engines, each of which dies when it samples POISON and is started again later."""

    def __init__(
        self, count: int, *, late: bool = False, restart_s: float = 0.3, shared: bool = False
    ) -> None:
        self.servers = [ScriptedEngine(self._answer, token_delay_s=0.005) for _ in range(count)]
        self.deaths: Counter[int] = Counter()
        """By the last id of the poisonous prompt."""
        self._late = late
        """Whether an engine dies only after a token of the poisonous call."""
        self._restart_s = restart_s
        self._arrived = asyncio.Event()
        """A token of the poisonous call has arrived from the engine that samples it now."""
        self._ends: set[asyncio.Task[None]] = set()
        self.router: Router
        self._shared = shared

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        engines = [VllmEngine(s.url, name=str(n)) for n, s in enumerate(self.servers)]
        self.router = Router(
            engines, check_interval_s=0.1, patience_s=20, vocab_size=1000, shared=self._shared
        )
        await self.router.start()

    async def close(self) -> None:
        await self.router.close()
        for task in self._ends:
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        for server in self.servers:
            await server.close()

    async def _answer(self, prompt_ids: list[int]) -> list[int]:
        size = prompt_ids.index(0) + 1
        if POISON in prompt_ids:
            server, call = next(
                (server, call)
                for server in self.servers
                for call in server.calls
                if call.prompt_ids == prompt_ids and call.fault is None
            )
            self.deaths[prompt_ids[size - 2]] += 1
            call.fault = Fault("stall", after_tokens=1)
            self._arrived.clear()
            self._ends.add(asyncio.create_task(self._end(server)))
            if not self._late:
                await asyncio.Event().wait()
        return ANSWER[len(prompt_ids) - size :]

    async def _end(self, server: ScriptedEngine) -> None:
        port = urlsplit(server.url).port or 0
        if self._late:
            await self._arrived.wait()
        await server.die()
        await server.close()
        await asyncio.sleep(self._restart_s)
        await server.start(port=port)

    async def call(self, prompt: list[int], session: str) -> list[int]:
        ids: list[int] = []

        def take(chunk: Chunk) -> None:
            ids.extend(chunk.ids)
            if POISON in prompt:
                self._arrived.set()

        generation = Generation(
            self.router,
            np.array([*prompt, 0], np.int32),
            Sampling(max_tokens=TOKENS, stop_token_ids=(2,)),
            request_id=f"{session}#0",
            session_id=session,
        )
        await generation.sample(take, lambda _: None)
        return ids


@pytest.fixture
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    four = Engines(4, late=getattr(request, "param", False))
    await four.start()
    yield four
    await four.close()


async def refused(engines: Engines, prompt: list[int], session: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(engines.call(prompt, session), 5)
    assert (caught.value.status, caught.value.code) == (400, "engines_lost")
    return caught.value


async def test_request_that_took_down_two_engines_is_refused_and_the_next_call_goes_on(
    engines: Engines,
) -> None:
    error = await refused(engines, [5, POISON, 1], "s")
    assert "took down 2 engines" in error.message
    assert engines.deaths == {1: 2}
    assert await asyncio.wait_for(engines.call([5], "s"), 5) == ANSWER


async def test_where_other_proxies_call_the_same_engines_nobody_is_known_to_be_alone() -> None:
    """Another proxy's call may have taken down two engines; a third one shows who it was."""
    engines = Engines(4, shared=True)
    await engines.start()
    error = await refused(engines, [5, POISON, 1], "s")
    assert "took down 3 engines" in error.message
    assert engines.deaths == {1: 3}
    await engines.close()


async def test_equal_request_takes_down_no_further_engine(engines: Engines) -> None:
    await refused(engines, [5, POISON, 1], "s")
    await refused(engines, [5, POISON, 1], "another")
    assert engines.deaths == {1: 2}


async def test_every_other_call_is_answered_soon_while_requests_kill_engines(
    engines: Engines,
) -> None:
    loop, waits_s = asyncio.get_running_loop(), list[float]()
    poisoned = list[RequestError]()

    async def agent(number: int) -> None:
        for turn in range(15):
            begun = loop.time()
            assert await engines.call([number + 1, turn + 1], f"s{number}") == ANSWER
            waits_s.append(loop.time() - begun)

    async def poisonous() -> None:
        for number in range(1, 4):
            poisoned.append(await refused(engines, [POISON, number], f"p{number}"))
            await asyncio.sleep(0.3)

    await asyncio.gather(poisonous(), *(agent(number) for number in range(12)))
    assert len(poisoned) == 3
    assert len(waits_s) == 12 * 15
    assert max(engines.deaths.values()) <= blame.ENGINES_LOST_LATE  # rarely more than 2
    assert max(waits_s) < 5


@pytest.mark.parametrize("engines", [True], indirect=True)
async def test_poison_that_works_after_some_tokens_is_found(engines: Engines) -> None:
    innocent = [asyncio.create_task(engines.call([n + 1], f"s{n}")) for n in range(8)]
    with pytest.raises(RequestError, match="took down"):
        await asyncio.wait_for(engines.call([POISON, 1], "p"), 10)
    assert await asyncio.gather(*innocent) == [ANSWER] * 8
    assert engines.deaths[1] <= blame.ENGINES_LOST_LATE


async def test_connections_that_break_are_no_engines_taken_down(engines: Engines) -> None:
    for server in engines.servers:
        server.faults = [Fault("die"), Fault("die", after_tokens=1)]
    assert await asyncio.wait_for(engines.call([5], "s"), 10) == ANSWER


async def test_call_that_finds_dead_engines_is_not_blamed_for_them(engines: Engines) -> None:
    await engines.router.check()
    ports = [urlsplit(server.url).port or 0 for server in engines.servers]
    for server in engines.servers:
        await server.close()
    call = asyncio.create_task(engines.call([5], "s"))
    await asyncio.wait([call], timeout=0.5)
    assert not any(info.healthy for info in engines.router.infos)
    for server, port in zip(engines.servers, ports, strict=True):
        await server.start(port=port)
    assert await asyncio.wait_for(call, 10) == ANSWER
