"""Checks each replica in a loop of its own: a slow check of one delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from proxy.engines.protocol import Engine

_log = logging.getLogger(__name__)


class HealthChecks:
    """Calls `check` for each watched engine at once, then every `interval_s`, and when it is
    suspected. `check` reports what it finds and raises nothing."""

    def __init__(self, check: Callable[[Engine], Awaitable[object]], interval_s: float) -> None:
        self._check = check
        self._interval_s = interval_s
        self._suspicions: dict[Engine, asyncio.Event] = {}
        self._loops: dict[Engine, asyncio.Task[None]] = {}

    def watch(self, engine: Engine) -> None:
        self._suspicions[engine] = asyncio.Event()
        self._loops[engine] = asyncio.create_task(self._keep_checking(engine))

    def suspect(self, engine: Engine) -> None:
        """The engine has failed a call: it is checked now, or again if a check is running."""
        if engine in self._suspicions:
            self._suspicions[engine].set()

    def forget(self, engine: Engine) -> None:
        if engine in self._loops:
            del self._suspicions[engine]
            self._loops.pop(engine).cancel()

    async def close(self) -> None:
        loops = list(self._loops.values())
        for engine in list(self._loops):
            self.forget(engine)
        await asyncio.gather(*loops, return_exceptions=True)

    async def _keep_checking(self, engine: Engine) -> None:
        suspicion = self._suspicions[engine]
        while True:
            suspicion.clear()
            try:
                await self._check(engine)
            except Exception:  # noqa: BLE001 - one error must not end an engine's checks for good
                _log.exception("the check of engine %s raised an error", engine.info.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await suspicion.wait()
