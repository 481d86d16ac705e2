"""Requests that kill the engines that sample them, among requests that do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import numpy as np
import pytest

from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError, RequestError
from proxy.routing import blame
from proxy.routing.blame import Attempt, Blame, Suspicion
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
        self._chunk = asyncio.Event()
        """A token of any call has arrived."""
        self._ends: set[asyncio.Task[None]] = set()
        self.router: Router
        self.engines: list[VllmEngine] = []
        self._shared = shared

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        self.engines = [VllmEngine(s.url, name=str(n)) for n, s in enumerate(self.servers)]
        self.router = Router(
            self.engines, check_interval_s=0.1, patience_s=20, vocab_size=1000, shared=self._shared
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
            engine = self.engines[self.servers.index(server)]
            # A call without a token would be suspected first.
            while not all(call.has_tokens for call in self.router.blame.running(engine)):
                self._chunk.clear()
                await self._chunk.wait()
        await server.die()
        await server.close()
        await asyncio.sleep(self._restart_s)
        await server.start(port=port)

    async def call(self, prompt: list[int], session: str) -> list[int]:
        ids: list[int] = []

        def take(chunk: Chunk) -> None:
            ids.extend(chunk.ids)
            self._chunk.set()
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


def an_engine() -> Engine:
    """One that is never called."""
    return VllmEngine("http://127.0.0.1:1")


class Lab:
    """Blame alone, with calls that begin, get tokens and break when the test says so."""

    def __init__(self) -> None:
        self.blame = Blame()
        self._attempts: dict[str, Attempt] = {}
        self._suspicions: dict[str, Suspicion] = {}

    def begin(self, name: str, engine: Engine, *, with_token: bool = True) -> None:
        new = Suspicion(np.array([*name.encode()], np.int32))
        suspicion = self._suspicions.setdefault(name, new)
        self._attempts[name] = Attempt(self.blame, engine, suspicion)
        self.blame.begin(self._attempts[name])
        if with_token:
            self.token(name)

    def grow_old(self, name: str, age_s: float) -> None:
        """As if its attempt had begun so much earlier."""
        self._attempts[name].begun_at -= age_s

    def token(self, name: str) -> None:
        self.blame.sampled(self._attempts[name].engine, self._attempts[name])

    def dies(self, engine: Engine, failure_id: str) -> None:
        """The engine breaks its calls, and the check finds it dead."""
        attempts = list(self.blame.running(engine))
        for attempt in attempts:
            self.blame.broken(engine, attempt, EngineError("reset"), failure_id)
        for attempt in attempts:
            self.blame.end(attempt)
        self.blame.settle(engine, self.blame.incident(engine), down=True)

    def lost(self, name: str) -> list[str]:
        return self._suspicions[name].lost

    async def guilty(self) -> list[str]:
        names = []
        for name, suspicion in self._suspicions.items():
            try:
                await self.blame.judged(suspicion)
            except RequestError:
                names.append(name)
        return names


@pytest.fixture
def lab() -> Lab:
    return Lab()


async def test_call_that_kills_late_is_found_though_each_engine_also_had_one_without_a_token(
    lab: Lab,
) -> None:
    """The call without a token is suspected first; once it has one elsewhere, it was the other."""
    for number in range(3):
        engine, neighbour, elsewhere = an_engine(), f"n{number}", an_engine()
        lab.begin("late", engine)
        lab.begin(neighbour, engine, with_token=number == 2)
        assert await lab.guilty() == []
        lab.dies(engine, f"f{number}")
        if number < 2:
            assert f"f{number}" not in lab.lost("late")
            lab.begin(neighbour, elsewhere)
            assert lab.lost(neighbour) == [f"f{number}"]
            assert lab.lost("late") == [f"f{n}" for n in range(number + 1)]
    assert await lab.guilty() == ["late"]


async def test_long_answer_beside_calls_that_kill_at_once_is_blamed_for_none(lab: Lab) -> None:
    for number in range(5):
        first, second, poison = an_engine(), an_engine(), f"p{number}"
        lab.begin("long", first)
        lab.begin(poison, first, with_token=False)
        lab.dies(first, f"a{number}")
        lab.begin("long", second)
        lab.begin(poison, second, with_token=False)
        lab.dies(second, f"b{number}")
    assert lab.lost("long") == []
    assert await lab.guilty() == [f"p{number}" for number in range(5)]


async def test_call_that_comes_to_a_dead_engine_whose_server_still_answers_is_not_blamed(
    lab: Lab,
) -> None:
    """A vLLM whose core has died answers each call with 500 until its server has ended."""
    engine = an_engine()
    for number in range(3):
        engine.info.healthy = False
        lab.begin("late comer", engine, with_token=False)
        lab.dies(engine, f"f{number}")
    assert lab.lost("late comer") == []
    engine.info.healthy = True
    lab.begin("late comer", engine, with_token=False)
    lab.dies(engine, "own")
    assert lab.lost("late comer") == ["own"]
    assert await lab.guilty() == []


async def test_call_that_has_waited_long_for_its_first_token_is_a_suspect(lab: Lab) -> None:
    """A busy engine reaches a call later than UNPROVEN_S after it came, beside calls that have just
    come."""
    for number in range(3):
        engine = an_engine()
        lab.begin("poison", engine, with_token=False)
        lab.grow_old("poison", blame.UNPROVEN_S + 1)
        lab.begin("young", engine, with_token=False)
        lab.dies(engine, f"f{number}")
        assert lab.lost("young") == lab.lost("poison") == [f"f{n}" for n in range(number + 1)]
        assert await lab.guilty() == []  # which of the two it was is not known
    lab.begin("young", an_engine())
    last = an_engine()
    lab.begin("poison", last, with_token=False)
    lab.dies(last, "f3")
    assert await lab.guilty() == ["poison"]


async def test_engines_that_die_beside_a_proven_call_are_not_its_own_while_a_suspect_is_unproven(
    lab: Lab,
) -> None:
    """Of two suspects only one has had a token since: it may have been the other."""
    engine = an_engine()
    lab.begin("long", engine)
    for name in ("n", "poison"):
        lab.begin(name, engine, with_token=False)
    lab.dies(engine, "f")
    lab.begin("n", an_engine())
    assert lab.lost("long") == []
    lab.begin("poison", an_engine())
    assert lab.lost("long") == ["f"]


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
