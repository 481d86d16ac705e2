"""A call being answered, and the connections that watch it.

Invariant: the sampling belongs to the call and not to a connection. A retry joins by watching;
when the last watcher has left before the end, the sampling is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from proxy.errors import ProxyError
from proxy.wire.dialect import Outcome, Piece


class LiveCall:
    def __init__(self, request_key: bytes, turns: list[int], prompt_tokens: int) -> None:
        self.request_key = request_key
        self.turns = turns
        """Index of the turn of each answer."""
        self.prompt_tokens = prompt_tokens
        self.delivered = False
        """Whether some agent got the whole answer."""
        self._pieces: list[Piece] = []
        self._watchers = 0
        self._waiting: list[asyncio.Future[bool]] = []
        self._why: ProxyError | None = None
        self._task: asyncio.Task[list[Outcome]] | None = None

    @property
    def abandoned(self) -> bool:
        """Nobody watches any more: the sampling is ending as cut."""
        return self._task is not None and self._watchers == 0

    def start(self, answering: Coroutine[Any, Any, list[Outcome]]) -> None:
        self._task = asyncio.create_task(answering)
        self._task.add_done_callback(self._ended)

    def push(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    def abort(self, why: ProxyError | None = None) -> None:
        """Ends the sampling; who still watches is told `why`."""
        self._why = why
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Returns when the call has ended, however it did."""
        await asyncio.wait([self._running()])

    async def outcomes(self) -> list[Outcome]:
        """The recorded answers. Raises what ended the call."""
        self._watchers += 1
        try:
            return await asyncio.shield(self._running())
        except asyncio.CancelledError:
            if self._why is not None and self._running().cancelled():
                raise self._why from None
            raise
        finally:
            self._leave()

    async def watch(self, keep_alive_s: float) -> AsyncGenerator[Piece | None, None]:
        """The pieces from the first on; None each time that nothing came for `keep_alive_s`."""
        task, loop, seen = self._running(), asyncio.get_running_loop(), 0
        silence = _Silence(loop, keep_alive_s)
        self._watchers += 1
        try:
            while True:
                while seen < len(self._pieces):
                    seen += 1
                    yield self._pieces[seen - 1]
                if task.done():
                    return
                waiting = silence.waiting = loop.create_future()
                self._waiting.append(waiting)
                if await waiting:
                    silence.heard_at = loop.time()
                else:
                    yield None
        finally:
            silence.end()
            self._leave()

    def _running(self) -> asyncio.Task[list[Outcome]]:
        if self._task is None:
            raise RuntimeError("the call was not started")
        return self._task

    def _leave(self) -> None:
        self._watchers -= 1
        if self._watchers == 0 and not self._running().done():
            self.abort()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            _wake_one(future, True)

    def _ended(self, task: asyncio.Task[list[Outcome]]) -> None:
        if not task.cancelled():
            task.exception()  # looked at: a watcher that has left will not fetch it
        self._wake()


class _Silence:
    """Wakes one watcher each time that it has waited for so long; one timer for a whole stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self.heard_at = loop.time()
        self.waiting: asyncio.Future[bool] | None = None
        self._timer = loop.call_later(limit_s, self._look)

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left = self.heard_at + self._limit_s - self._loop.time()
        if left <= 0:
            if self.waiting is not None:
                _wake_one(self.waiting, False)
            left = self._limit_s
        self._timer = self._loop.call_later(left, self._look)


def _wake_one(future: asyncio.Future[bool], came: bool) -> None:
    if not future.done():
        future.set_result(came)
