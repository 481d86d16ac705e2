"""Supervises a generation and a health check of an engine that is reached by HTTP.

Invariant: a generation whose reader leaves before the last chunk is aborted at the engine; a
generation that has ended is not aborted. `info.in_flight` counts the running generations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from proxy.engines.protocol import Chunk, EngineInfo
from proxy.errors import EngineError


async def watched(
    chunks: AsyncGenerator[Chunk, None], info: EngineInfo, abort: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks; the last one has the finish reason.

    Raises:
        EngineError: `chunks` raised it; or there was no finish reason, or something came after it.
    """
    last: Chunk | None = None
    info.in_flight += 1
    try:
        async for chunk in chunks:
            if last is not None:
                _nothing_more(chunk, info)
            elif chunk.finish_reason is not None:
                last = chunk
            else:
                yield chunk
        if last is None:
            raise EngineError(
                f"engine {info.url} ended its stream without a finish reason", status=502
            )
        yield last
    except (GeneratorExit, asyncio.CancelledError):
        if last is None:
            with contextlib.suppress(EngineError):
                await abort()
        raise
    finally:
        info.in_flight -= 1
        await chunks.aclose()


def _nothing_more(chunk: Chunk, info: EngineInfo) -> None:
    if chunk.ids or chunk.finish_reason is not None:
        raise EngineError(
            f"engine {info.url} sent tokens or a second finish reason after its finish reason",
            status=502,
        )


async def checked(info: EngineInfo, learn: Awaitable[None]) -> None:
    """Awaits `learn` and sets `info.healthy`. Raises the EngineError of `learn`."""
    try:
        await learn
    except EngineError:
        info.healthy = False
        raise
    info.healthy = True
