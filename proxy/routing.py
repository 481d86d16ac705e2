"""Which replica samples a call: the one that holds its session's prefix, else the least loaded.

Invariant: a call goes to a second replica only if the first gave out none of its tokens. A replica
that fails is out of the choice until a health check says that it is back, or no other is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from proxy.engines.protocol import Chunk, Engine, EngineInfo, Sampling
from proxy.errors import EngineError, RequestError
from proxy.records import Ids

REMEMBERED_SESSIONS = 100_000
"""Past it the session that was idle longest is forgotten: its next call costs one prefill."""

_log = logging.getLogger(__name__)


class Router:
    """The proxy's engines as one. `start` begins the health checks, `close` ends them."""

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        version: int = 0,
        check_interval_s: float = 2.0,
        pause_timeout_s: float = 900.0,
    ) -> None:
        """`pause_timeout_s`: how long a call waits for `resume` before it is refused."""
        self._engines = {engine.info.name: engine for engine in engines}
        self._version = version
        self._check_interval_s = check_interval_s
        self._pause_timeout_s = pause_timeout_s
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._removed: set[Engine] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._suspicion = asyncio.Event()
        self._checking: asyncio.Task[None] | None = None

    @property
    def infos(self) -> list[EngineInfo]:
        return [engine.info for engine in self._engines.values()]

    @property
    def version(self) -> int:
        """The weights' version where an engine does not tell it."""
        return max([self._version, *(info.version for info in self.infos)])

    @property
    def context_tokens(self) -> int | None:
        """What every replica takes."""
        known = [info.max_context_tokens for info in self.infos if info.max_context_tokens]
        return min(known, default=None)

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        stream: bool = True,
    ) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`, by the first replica that begins to answer.

        Raises:
            EngineError: 503 when no replica is left, or the pause is too long.
        """
        await self._until_running()
        failure: EngineError | None = None
        tried: set[str] = set()
        while (engine := self._choose(session_id, tried, sampling.trained)) is not None:
            tried.add(engine.info.name)
            chunks = engine.generate(prompt_ids, sampling, request_id=request_id, stream=stream)
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
                return
            except EngineError as error:
                self._suspect(engine, error)
                if error.started:
                    raise
                failure = error
            finally:
                await self._close_if_removed(engine)
        if failure is None and self._engines:
            raise RequestError(
                "this session trains, and no engine here tells tokens (all are text-only); create "
                "it as kind eval, or add an engine that does"
            )
        raise failure or EngineError("there is no engine; try again later")

    def set_version(self, version: int) -> None:
        self._version = version

    def pause(self) -> None:
        """Calls that have not begun wait; those that have go on."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def add(self, engine: Engine) -> None:
        """Raises RequestError when the name is taken."""
        if engine.info.name in self._engines:
            raise RequestError(f"name: an engine {engine.info.name!r} is there", status=409)
        self._engines[engine.info.name] = engine
        self._suspicion.set()

    async def remove(self, name: str) -> None:
        """It gets no new call; those that it is answering go on.

        Raises RequestError when there is none of this name.
        """
        engine = self._engines.pop(name, None)
        if engine is None:
            raise RequestError(f"name: no engine {name!r}", status=404)
        self._removed.add(engine)
        await self._close_if_removed(engine)

    async def check(self) -> None:
        """Asks every replica. Raises EngineError when none answers."""
        engines = list(self._engines.values())
        outcomes = await asyncio.gather(*(_check(engine) for engine in engines))
        if not any(outcome is None for outcome in outcomes):
            raise next(iter(outcomes), None) or EngineError("there is no engine")

    async def start(self) -> None:
        """Checks the replicas from now on, every `check_interval_s` and after each failure."""
        self._checking = asyncio.create_task(self._check_on_and_on())

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._checking
        for engine in (*self._engines.values(), *self._removed):
            await engine.close()

    async def _until_running(self) -> None:
        if self._running.is_set():
            return
        try:
            async with asyncio.timeout(self._pause_timeout_s):
                await self._running.wait()
        except TimeoutError as error:
            raise EngineError(f"engines were paused for {self._pause_timeout_s:.0f} s") from error

    def _choose(self, session_id: str, tried: set[str], trained: bool) -> Engine | None:
        left = [
            engine
            for name, engine in self._engines.items()
            if name not in tried and not (trained and engine.info.text_only)
        ]
        if not left:
            return None
        # Where none is known to be well, one that is out is asked: it may be back, or only slow.
        usable = [engine for engine in left if engine.info.healthy] or left
        home = self._homes.get(session_id)
        chosen = min(usable, key=lambda e: (e.info.name != home, e.info.in_flight))
        self._homes[session_id] = chosen.info.name
        self._homes.move_to_end(session_id)
        if len(self._homes) > REMEMBERED_SESSIONS:
            self._homes.popitem(last=False)
        return chosen

    def _suspect(self, engine: Engine, error: EngineError) -> None:
        """Out of the choice at once; the check that follows brings it back if it is well."""
        _log.warning("engine %s failed a call: %s", engine.info.name, error.message)
        engine.info.healthy = False
        self._suspicion.set()

    async def _close_if_removed(self, engine: Engine) -> None:
        if engine in self._removed and engine.info.in_flight == 0:
            self._removed.discard(engine)
            await engine.close()

    async def _check_on_and_on(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_interval_s):
                    await self._suspicion.wait()
            self._suspicion.clear()
            await asyncio.gather(*(_check(engine) for engine in list(self._engines.values())))


async def _check(engine: Engine) -> EngineError | None:
    was_healthy = engine.info.healthy
    try:
        await engine.check()
    except EngineError as error:
        if was_healthy:
            _log.warning("engine %s is out: %s", engine.info.name, error.message)
        return error
    if not was_healthy:
        _log.info("engine %s is back", engine.info.name)
    return None
