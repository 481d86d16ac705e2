"""Distributes the pieces of a call's answers to all connections that watch it.

Invariant: every watcher gets every piece from the first one on, whenever it joins. The stream ends
once, with the recorded answers or with the error that ended the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from proxy.wire.dialect import Outcome, Piece

if TYPE_CHECKING:
    from proxy.serving.call import LiveCall


class AnswerStream:
    """The pieces of a call's answers in order, followed by the answers themselves."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.followers: list[Callable[[], None]] = []
        """Called after each piece, and at the end. They must not raise."""
        self._ends: list[asyncio.Future[Sequence[Outcome]]] = []
        self._result: Sequence[Outcome] | BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._result is not None

    @property
    def failed(self) -> bool:
        """Whether the watchers got an error in the place of the answers."""
        return isinstance(self._result, BaseException)

    def push(self, piece: Piece) -> None:
        """Adds a piece for all watchers."""
        self.pieces.append(piece)
        for follower in self.followers:
            follower()

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

    def _end(self) -> None:
        for follower in self.followers:
            follower()
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
        self.outcomes = call.stream.outcomes

    def __enter__(self) -> Watcher:
        self.call.watchers.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.call.left_by(self)
