"""Distributes the pieces of a call's answers to all connections that watch it.

Invariant: every watcher gets every piece from the first one on, whenever it joins. The stream ends
once, with the recorded answers or with the error that ended the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from proxy.wire.dialect import Outcome, Piece

if TYPE_CHECKING:
    from proxy.serving.call import LiveCall


class AnswerStream:
    """The pieces of a call's answers in order, followed by the answers themselves."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._waiting: list[asyncio.Future[bool]] = []
        self._ends: list[asyncio.Future[Sequence[Outcome]]] = []
        self._result: Sequence[Outcome] | BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._result is not None

    def push(self, piece: Piece) -> None:
        """Adds a piece for all watchers."""
        self._pieces.append(piece)
        self._wake()

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Ends the stream with the recorded answers."""
        self._result = outcomes
        self._end()

    def fail(self, error: BaseException) -> None:
        """Ends the stream with `error`, which every watcher raises."""
        self._result = error
        self._end()

    def outcomes(self) -> asyncio.Future[Sequence[Outcome]]:
        """The recorded answers, or the error that ended the call. Await it."""
        end: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self._ends.append(end)
        if self.ended:
            self._end()
        return end

    async def pieces(self, keep_alive_s: float) -> AsyncGenerator[Piece | None, None]:
        """Yields every piece, and None after each `keep_alive_s` seconds without a piece."""
        loop, seen = asyncio.get_running_loop(), 0
        silence = _Silence(loop, keep_alive_s)
        try:
            while True:
                while seen < len(self._pieces):
                    seen += 1
                    yield self._pieces[seen - 1]
                if self.ended:
                    return
                waiting = silence.waiting = loop.create_future()
                self._waiting.append(waiting)
                if await waiting:
                    silence.heard_at = loop.time()
                else:
                    yield None
        finally:
            silence.end()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            _wake_one(future, True)

    def _end(self) -> None:
        self._wake()
        ends, self._ends = self._ends, []
        for end in ends:
            if end.done():  # its watcher has left
                continue
            if isinstance(self._result, BaseException):
                end.set_exception(self._result)
            elif self._result is not None:
                end.set_result(self._result)


class Watcher:
    """One HTTP request that waits for a call's answer, as a context manager."""

    def __init__(self, call: LiveCall, is_connected: Callable[[], bool]) -> None:
        """`is_connected`: whether the agent still waits for the response."""
        self.call = call
        self.is_connected = is_connected
        self.arrived = False
        """Set it when the whole answer was sent."""
        self.pieces = call.stream.pieces
        self.outcomes = call.stream.outcomes

    def __enter__(self) -> Watcher:
        self.call.watchers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.call.left_by(self)


class _Silence:
    """Wakes a watcher after each `limit_s` of silence; one timer serves a whole stream."""

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
