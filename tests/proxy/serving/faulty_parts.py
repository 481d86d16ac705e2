"""A store and an engine in which any await can be made to fail, be cancelled, or hang."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

from proxy.engines.protocol import Chunk, EngineInfo, PreparedImage, Sampling, Take
from proxy.errors import EngineError, StoreError
from proxy.records import FinishReason, Ids
from proxy.records.images import check_images
from proxy.rendering.rendering import Rendering
from proxy.store.sqlite import SqliteStore

FaultKind = Literal["fail", "cancel", "crash", "stand"]


class CrashError(Exception):
    """An error that the proxy does not handle."""


@dataclass
class Gates:
    """The await points of a store and an engine, numbered in the order they are reached."""

    armed: dict[int, FaultKind] = field(default_factory=dict)
    passed: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    """Whether the process is dead: every await hangs from then on."""

    def arm(self, kind: FaultKind, after: int) -> None:
        """Makes the fault happen at the await point after the next `after` ones."""
        self.armed[self.passed + after] = kind

    def disarm(self) -> None:
        """Ends all faults and lets hanging awaits continue."""
        self.armed.clear()
        self.released.set()
        self.released = asyncio.Event()

    async def pass_through(self, error: Exception) -> None:
        if self.killed:
            await asyncio.Event().wait()
        kind = self.armed.pop(self.passed, None)
        self.passed += 1
        if kind == "fail":
            raise error
        if kind == "crash":
            raise CrashError("an error from outside")
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "stand":
            await self.released.wait()


def faulty(store: SqliteStore, gates: Gates) -> Any:
    """A store with a gate before and after each of its methods."""

    class FaultyStore:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            method = getattr(store, name)

            @wraps(method)
            async def gated(*args: Any, **kwargs: Any) -> Any:
                await gates.pass_through(StoreError(f"{name} was not done"))
                result = await method(*args, **kwargs)
                await gates.pass_through(StoreError(f"{name} was done"))
                return result

            return gated

    return FaultyStore()


class GatedEngine:
    """Samples a different text each time, in two chunks, with a gate before each chunk."""

    numbers = itertools.count()

    def __init__(self, rendering: Rendering, gates: Gates) -> None:
        self.info = EngineInfo("gated", "http://gated", images=rendering.image_token is not None)
        self._rendering = rendering
        self._gates = gates

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        if sampling.images is not None:
            check_images(prompt_ids, sampling.images.spans)
            for span in sampling.images.spans:
                await sampling.images.item(span)
        ids = self._rendering.tokenizer.encode(f"Answer {next(self.numbers)}, thank you.")
        await self._gates.pass_through(EngineError("failed at once"))
        take(Chunk(ids, [-1.0] * len(ids)))
        await self._gates.pass_through(EngineError("failed in mid-answer"))
        end = self._rendering.stop_token_ids[0]
        take(Chunk([end], [-0.5], finish_reason=FinishReason.STOP))

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        token = self._rendering.image_token
        assert token is not None
        await self._gates.pass_through(EngineError("prepared nothing"))
        return PreparedImage(hashlib.sha256(data).hexdigest(), 3, token, (1, 2, 6), "item")

    async def abort(self, request_id: str) -> None:
        pass

    def forget(self, session_id: str) -> None:
        pass

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass
