"""Several scripted replicas behind one router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError, RequestError
from proxy.extras.schedule.admission import CacheAdmission
from proxy.extras.schedule.section import SchedulingConfig
from proxy.records import EMPTY_IDS
from proxy.routing.blame import Attempt, Suspicion
from proxy.routing.cache_room import RoomClaim
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from tests.proxy.pushed import pieces_of

PROMPT = np.array([1, 2], np.int32)
ANSWER = [5, 6, 2]


class Replicas:
    """Servers `0` and `1`, and the router before them."""

    def __init__(self, servers: list[ScriptedEngine], router: Router) -> None:
        self.servers = servers
        self.router = router

    async def call(self, session_id: str) -> list[int]:
        answer = Generation(
            self.router, PROMPT, Sampling(max_tokens=9), request_id="r", session_id=session_id
        )
        return [
            i async for chunk in pieces_of(answer) if isinstance(chunk, Chunk) for i in chunk.ids
        ]

    @property
    def calls(self) -> list[int]:
        return [len(server.calls) for server in self.servers]


@pytest.fixture
async def replicas() -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(ScriptedEngine(lambda _: ANSWER)) for _ in range(2)
        ]
        engines = [VllmEngine(s.url, name=str(n)) for n, s in enumerate(servers)]
        router = Router(engines, check_interval_s=0.05, patience_s=0)
        yield Replicas(servers, router)
        await router.close()


async def test_session_stays_on_the_replica_that_has_its_prefix(replicas: Replicas) -> None:
    for _ in range(5):
        await replicas.call("one")
    assert sorted(replicas.calls) == [0, 5]


async def test_new_session_goes_to_the_least_loaded_replica(replicas: Replicas) -> None:
    replicas.servers[0].faults = [Fault("stall")]
    stalled = asyncio.create_task(replicas.call("stalled"))
    await replicas.servers[0].called.wait()
    await asyncio.gather(*(replicas.call(f"s-{n}") for n in range(1)))
    assert replicas.calls == [1, 1]
    stalled.cancel()


@pytest.mark.parametrize("kind", ["die", "error", "nonsense"])
async def test_call_that_fails_before_its_first_token_goes_to_another_replica(
    replicas: Replicas, kind: str
) -> None:
    replicas.servers[0].faults = [Fault(kind)]  # type: ignore[arg-type]
    assert await replicas.call("one") == ANSWER
    assert replicas.calls == [1, 1]


async def test_call_that_has_begun_goes_on_at_another_replica(replicas: Replicas) -> None:
    replicas.servers[0].faults = [Fault("die", after_tokens=1)]
    replicas.servers[1].script = lambda prompt: ANSWER[len(prompt) - len(PROMPT) :]
    assert await replicas.call("one") == ANSWER
    assert replicas.calls == [1, 1]
    assert replicas.servers[1].calls[0].prompt_ids == [*PROMPT, ANSWER[0]]


async def test_refused_request_is_not_sent_to_another_replica(replicas: Replicas) -> None:
    for server in replicas.servers:
        server.max_context_tokens = 1
    with pytest.raises(RequestError):
        await replicas.call("one")
    assert all(info.healthy for info in replicas.router.infos)


async def test_dead_replica_gets_no_calls_until_it_is_healthy_again(replicas: Replicas) -> None:
    server = replicas.servers[0]
    port = int(server.url.rsplit(":", 1)[1])
    await replicas.router.start()
    await server.close()
    for n in range(4):
        assert await replicas.call(f"s-{n}") == ANSWER
    assert [info.healthy for info in replicas.router.infos] == [False, True]
    server.checked.clear()
    await server.start(port=port)
    await server.checked.wait()  # the router checks without a call
    await replicas.router.check()
    replicas.servers[1].faults = [Fault("die")]
    assert await replicas.call("s-0") == ANSWER
    assert replicas.calls == [1, 5]


async def test_slow_check_of_one_replica_delays_no_other(replicas: Replicas) -> None:
    slow, dead = replicas.servers
    slow.answers_health.clear()
    await replicas.router.start()
    await slow.checked.wait()
    dead.healthy = False
    for _ in range(2):  # when the second check begins, the first has been answered
        dead.checked.clear()
        await dead.checked.wait()
    assert [info.healthy for info in replicas.router.infos] == [True, False]
    slow.answers_health.set()


async def test_calls_that_wait_at_a_replica_whose_check_raises_look_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def checked() -> None:
        raise ZeroDivisionError

    admission = CacheAdmission(SchedulingConfig())
    admission.report("0", 1000)
    engine = VllmEngine("http://127.0.0.1:9", name="0")
    monkeypatch.setattr(engine, "check", checked)
    router = Router([engine], admission=admission)
    names = ["0"]
    calls = [RoomClaim(str(n), str(n), prompt_tokens=700, max_tokens=1) for n in range(2)]
    assert await admission.admitted(calls[0], lambda: names) == "0"
    waiting = asyncio.create_task(admission.admitted(calls[1], lambda: names))
    await asyncio.sleep(0)  # it waits for room
    names = []
    with pytest.raises(ZeroDivisionError):
        await router.check()
    async with asyncio.timeout(60):
        assert await waiting is None
    assert not engine.info.healthy
    await router.close()


async def test_late_failure_of_a_removed_replica_does_not_hold_calls_of_its_successor() -> None:
    overdue: list[bool] = []
    admission = CacheAdmission(
        SchedulingConfig(max_wait_s=0.05),
        on_admitted=lambda waited_s, late: overdue.append(late),
    )
    old, new = (VllmEngine("http://127.0.0.1:9", name="0") for _ in range(2))
    router = Router([old], admission=admission)
    old.info.in_flight = 1
    await router.remove("0")
    await router.add(new)
    admission.report("0", 1000)
    attempt = Attempt(router.blame, old, Suspicion(EMPTY_IDS))
    router.failed(old, EngineError("it was ended"), attempt)
    claim = RoomClaim("call", "session", prompt_tokens=700, max_tokens=1)
    assert await admission.admitted(claim, lambda: ["0"]) == "0"
    assert overdue == [False]
    await router.close()


async def test_error_is_retryable_if_no_replica_is_healthy(replicas: Replicas) -> None:
    for server in replicas.servers:
        await server.close()
    for _ in range(2):
        with pytest.raises(EngineError) as refused:
            await replicas.call("one")
        assert refused.value.status == 503
        assert refused.value.retry_after_s
    with pytest.raises(EngineError):
        await replicas.router.check()


async def test_unhealthy_replica_is_used_if_no_other_is_left(replicas: Replicas) -> None:
    for info in replicas.router.infos:
        info.healthy = False
    assert await replicas.call("one") == ANSWER


async def test_paused_calls_wait_and_then_continue(replicas: Replicas) -> None:
    replicas.router.pause()
    calls = [asyncio.create_task(replicas.call(f"s-{n}")) for n in range(3)]
    await replicas.router.check()
    assert replicas.calls == [0, 0]
    replicas.router.resume()
    assert await asyncio.gather(*calls) == [ANSWER] * 3


async def test_pause_that_begins_before_the_calls_of_the_last_one_wake_holds_them(
    replicas: Replicas,
) -> None:
    replicas.router.pause()
    calls = [asyncio.create_task(replicas.call(f"s-{n}")) for n in range(3)]
    await replicas.router.check()
    replicas.router.resume()
    replicas.router.pause()
    await replicas.router.check()
    assert replicas.calls == [0, 0]
    replicas.router.resume()
    assert await asyncio.gather(*calls) == [ANSWER] * 3


async def test_endless_pause_fails_the_call_after_the_timeout() -> None:
    router = Router([], pause_timeout_s=0.01)
    router.pause()
    with pytest.raises(EngineError, match="paused"):
        await Replicas([], router).call("one")


async def test_removed_replica_finishes_its_calls(replicas: Replicas) -> None:
    replicas.servers[0].token_delay_s = 0.05
    call = asyncio.create_task(replicas.call("one"))
    await replicas.servers[0].called.wait()
    await replicas.router.remove("0")
    assert await call == ANSWER
    assert await replicas.call("one") == ANSWER
    assert replicas.calls == [1, 1]
    with pytest.raises(RequestError):
        await replicas.router.remove("0")


async def test_second_replica_with_the_same_name_is_refused(replicas: Replicas) -> None:
    await replicas.router.add(VllmEngine(replicas.servers[0].url, name="2"))
    another = VllmEngine(replicas.servers[0].url, name="2")
    with pytest.raises(RequestError):
        await replicas.router.add(another)


async def test_version_is_the_newest_reported_one(replicas: Replicas) -> None:
    replicas.router.set_version(3)
    assert replicas.router.version == 3
    replicas.servers[1].version = 5
    await replicas.router.check()
    assert replicas.router.version == 5
    assert replicas.router.context_tokens == 131_072
