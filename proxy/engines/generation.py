"""What every engine reached by HTTP does around one generation, and around a health check.

Invariant: a generation that its reader leaves before its last chunk is aborted at the engine; one
that ended is not. `info.in_flight` counts those that are neither.
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
    """The chunks up to the one with a finish_reason.

    Raises:
        EngineError: as `chunks` did, with `started` set; or they ended without a finish_reason.
    """
    started = ended = False
    info.in_flight += 1
    try:
        async for chunk in chunks:
            ended = chunk.finish_reason is not None
            yield chunk
            started = True
            if ended:
                return
        raise EngineError(f"engine {info.url} ended its stream without a finish_reason", status=502)
    except EngineError as error:
        error.started = started
        raise
    except (GeneratorExit, asyncio.CancelledError):
        if not ended:
            with contextlib.suppress(EngineError):
                await abort()
        raise
    finally:
        info.in_flight -= 1
        await chunks.aclose()


async def checked(info: EngineInfo, learn: Awaitable[None]) -> None:
    """`info.healthy` is whether `learn` ended without EngineError, which is raised on."""
    try:
        await learn
    except EngineError:
        info.healthy = False
        raise
    info.healthy = True


def version_number(label: object, otherwise: int) -> int:
    """Engines label weights with text; until someone sets a number it is `default`."""
    text = str(label)
    return int(text) if text.isascii() and text.isdigit() else otherwise
