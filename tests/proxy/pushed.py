"""What an engine or a generation passes on, as asynchronous generators.

To close one cancels the call. Invariant: an item is yielded before the error that came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.records import Ids
from proxy.routing.generation import Generation, Seam

Item = TypeVar("Item")


def chunks_of(
    engine: Engine, prompt_ids: Ids, sampling: Sampling, **more: Any
) -> AsyncGenerator[Chunk, None]:
    """`more`: see `Engine.generate`."""
    return _pushed(lambda take: engine.generate(prompt_ids, sampling, take, **more))


def pieces_of(generation: Generation) -> AsyncGenerator[Chunk | Seam, None]:
    return _pushed(lambda take: generation.sample(take, take))


async def _pushed(run: Callable[[Callable[[Item], None]], Awaitable[None]]) -> AsyncGenerator[Item]:
    items: asyncio.Queue[Item | None] = asyncio.Queue()
    call = asyncio.ensure_future(run(items.put_nowait))
    call.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await call
    finally:
        call.cancel()
        await asyncio.wait([call])
