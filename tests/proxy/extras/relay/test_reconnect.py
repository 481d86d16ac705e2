"""A worker's calls outlive a lost connection by the grace time, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import SecretStr

from proxy.engines.protocol import Chunk, Take
from proxy.engines.vllm import VllmEngine
from proxy.extras.relay import worker as worker_module
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.protocol import Frame, Generate, Welcome, pack_ids
from proxy.extras.relay.worker import RelayWorker, WorkerRefused
from proxy.extras.relay.worker_config import WorkerConfig
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.extras.relay.conftest import PROMPT, TOKEN

GRACE_S = 3600.0
Attempt = Callable[[], None]
"""What happens in an attempt to connect, which then is lost."""


@pytest_asyncio.fixture
async def worker(model: Path, server: ScriptedEngine) -> AsyncIterator[RelayWorker]:
    config = WorkerConfig(
        proxy="ws://127.0.0.1:1", engine=server.url, model=model, token=SecretStr(TOKEN)
    )
    engine = VllmEngine(server.url)
    await engine.check()
    made = RelayWorker(engine, fingerprint(model), config)
    async with asyncio.TaskGroup() as tasks:
        made._tasks = tasks
        yield made
        made._abandon()
    await made._weights.close()
    await engine.close()


async def attempts(
    worker: RelayWorker, monkeypatch: pytest.MonkeyPatch, *made: Attempt | None
) -> None:
    """Makes these attempts to connect, of which each is lost at once, and the last one is refused.
    None: one that fails before the handshake."""
    left = list(made)

    async def connection() -> str:
        if not left:
            raise WorkerRefused("the end of the test")
        if (attempt := left.pop(0)) is not None:
            attempt()
        return "it was lost"

    monkeypatch.setattr(worker, "_connection", connection)
    monkeypatch.setattr(worker_module, "BACKOFF_S", 0.0)
    await worker._serve()


def pending(worker: RelayWorker) -> int:
    """The number of timers that will end the worker's calls."""
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(not timer.cancelled() and timer._callback == worker._abandon for timer in scheduled)


def welcome(worker: RelayWorker, resumed: dict[int, int] | None = None) -> Attempt:
    return lambda: _welcome(worker, resumed or {})


def _welcome(worker: RelayWorker, resumed: dict[int, int]) -> None:
    worker._resume(Welcome(window=8, grace_s=GRACE_S, resumed=resumed))
    assert pending(worker) == 0  # a connection that stands has none


async def test_failed_attempts_leave_no_timer_that_ends_the_calls_of_a_later_connection(
    worker: RelayWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = welcome(worker)
    await attempts(worker, monkeypatch, None, None, again, None, None, again, again, None)
    assert pending(worker) == 1


async def test_grace_time_counts_from_the_loss_and_not_from_the_last_attempt(
    worker: RelayWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attempts(worker, monkeypatch, welcome(worker))
    timer = worker._expiry
    assert timer is not None
    await attempts(worker, monkeypatch, None, None)
    assert worker._expiry is timer


async def test_call_that_ended_in_the_handshake_is_an_error_of_that_call_alone(
    worker: RelayWorker, server: ScriptedEngine
) -> None:
    server.token_delay_s = 60.0
    for number in (0, 1):
        worker._begin(
            Generate(number, f"r#{number}", pack_ids(PROMPT), {"max_tokens": 9}, None, stream=True)
        )
    worker._end(0)
    outbox = worker._resume(Welcome(window=8, grace_s=GRACE_S, resumed={0: 5, 1: 0}))
    assert outbox.get_nowait() == Frame(0, 5, error="the worker has ended the call")
    assert outbox.empty()
    assert list(worker._calls) == [1]


async def test_answer_that_cannot_be_sent_is_an_error_of_its_call_alone(
    worker: RelayWorker, server: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token_delay_s = 60.0
    outbox = worker._resume(Welcome(window=8, grace_s=GRACE_S, resumed={}))
    worker._begin(Generate(0, "r#0", pack_ids(PROMPT), {"max_tokens": 9}, None, stream=True))

    async def nonsense(ids: object, sampling: object, take: Take, **_: object) -> None:
        take(Chunk([2**31], [-0.5]))

    await server.called.wait()
    monkeypatch.setattr(worker._engine, "generate", nonsense)
    worker._begin(Generate(1, "r#1", pack_ids(PROMPT), {"max_tokens": 9}, None, stream=True))
    async with asyncio.timeout(10):
        frame = await outbox.get()
    assert isinstance(frame, Frame)
    assert (frame.call, frame.number) == (1, 0)
    assert "OverflowError" in (frame.error or "")
    assert not frame.refused
    assert list(worker._calls) == [0, 1]
