"""Which replica samples a call: the least loaded one that is healthy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from proxy.engines.protocol import Chunk, Engine, EngineInfo, Sampling
from proxy.errors import EngineError, RequestError
from proxy.records import Ids


class Router:
    """The proxy's engines as one."""

    def __init__(self, engines: list[Engine], *, version: int = 0) -> None:
        self._engines = {engine.info.name: engine for engine in engines}
        self._version = version
        self._running = asyncio.Event()
        self._running.set()

    @property
    def infos(self) -> list[EngineInfo]:
        return [engine.info for engine in self._engines.values()]

    @property
    def version(self) -> int:
        """The weights' version where an engine does not tell it."""
        return max([self._version, *(info.version for info in self.infos)])

    @property
    def context_tokens(self) -> int | None:
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
        stream: bool,
    ) -> AsyncGenerator[Chunk, None]:
        """Raises EngineError when no replica can answer."""
        await self._running.wait()
        engines = [engine for engine in self._engines.values() if engine.info.healthy]
        if not engines:
            raise EngineError("no engine is healthy; try again later")
        engine = min(engines, key=lambda engine: engine.info.in_flight)
        chunks = engine.generate(prompt_ids, sampling, request_id=request_id, stream=stream)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def set_version(self, version: int) -> None:
        self._version = version

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def add(self, engine: Engine) -> None:
        """Raises RequestError when the name is taken."""
        if engine.info.name in self._engines:
            raise RequestError(f"name: an engine {engine.info.name!r} is there", status=409)
        self._engines[engine.info.name] = engine

    async def remove(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is None:
            raise RequestError(f"name: no engine {name!r}", status=404)
        await engine.close()

    async def check(self) -> None:
        """Raises EngineError when no replica answers."""
        errors = []
        for engine in self._engines.values():
            try:
                await engine.check()
            except EngineError as error:
                errors.append(error)
        if len(errors) == len(self._engines):
            raise errors[0] if errors else EngineError("there is no engine")

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
