"""The loop that checks a replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.engines.protocol import Engine
from proxy.engines.vllm import VllmEngine
from proxy.routing.router import HealthChecks


class Counted:
    """A check that notes its calls, and raises `error` in the first one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.engines: asyncio.Queue[Engine] = asyncio.Queue()
        self.error = error

    async def __call__(self, engine: Engine) -> None:
        self.engines.put_nowait(engine)
        error, self.error = self.error, None
        if error is not None:
            raise error
        engine.info.healthy = True


@pytest.fixture
def engine() -> VllmEngine:
    return VllmEngine("http://127.0.0.1:9", name="e")


async def test_error_of_a_check_is_logged_and_does_not_end_the_checks(
    engine: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    check = Counted(ZeroDivisionError("division"))
    checks = HealthChecks(check, interval_s=0.01)
    checks.watch(engine)
    await check.engines.get()
    await check.engines.get()
    await checks.close()
    assert "the check of engine e raised an error" in caplog.text
    assert "ZeroDivisionError: division" in caplog.text


async def test_suspected_engine_is_checked_at_once_and_a_forgotten_one_never(
    engine: VllmEngine,
) -> None:
    check = Counted()
    checks = HealthChecks(check, interval_s=1e9)
    checks.watch(engine)
    await check.engines.get()
    checks.suspect(engine)
    await check.engines.get()
    checks.forget(engine)
    checks.suspect(engine)
    await checks.close()
    assert check.engines.empty()


async def test_suspicion_during_a_check_leads_to_another_one(engine: VllmEngine) -> None:
    began, go_on = asyncio.Queue[Any](), asyncio.Event()

    async def slow(_: Engine) -> None:
        began.put_nowait(None)
        await go_on.wait()

    checks = HealthChecks(slow, interval_s=1e9)
    checks.watch(engine)
    await began.get()
    checks.suspect(engine)
    go_on.set()
    await began.get()
    await checks.close()
