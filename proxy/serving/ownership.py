"""Decides which of several processes on one store serves a session.

A process holds a session while it has unsettled turns in it: turns that are open, or answered but
still on their way to the agent. A process may begin a turn only if its tree has every turn of the
session (an index is unique in the store) and no other living process with an address holds the
session. So all calls of a session in flight are in one process: a retry joins the call that it
repeats, and the session's limits are exact.

    acquired   by recording the intent of a turn            `LiveCall`
    released   when the turn's answer is recorded and marked
                 as arrived or lost                         `Deliveries`
               when the turn is closed as CUT               `Ownership.close`
               when the process ends                        its lock in the store
               when the process begins to stop              `Store.announce(None)`

Holding a session needs no SQL statement and no clock. A call that reaches another process is
forwarded to the holder (`forwarding.py`).

A call marks its turn when the last byte of the answer has been written to the connection, or when
the connection has broken. The marks of all sessions are written together, at most `DELAY_S` later,
so that no call waits for them. Invariant: a turn stays in `LiveSession.own` until its mark is
durable, so that the session stays in memory and other processes forward its calls to this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from proxy.errors import HeldElsewhere, StoreError
from proxy.records import Session, TurnStatus
from proxy.serving.sessions import LiveSession
from proxy.store.protocol import DeliveryMark, Store

_log = logging.getLogger(__name__)

CLOSE_DELAYS_S = (0.05, 0.5, 2.0, 5.0)
"""Delays between attempts to close a turn while the store fails; the last one repeats."""
CLOSE_WAIT_S = 1.0
"""How long a call waits until the turns of earlier calls are closed."""
DELAY_S = 0.05
"""A killed process loses the marks of this time, and their answers count as not arrived."""
RETRY_DELAY_S = 1.0
"""Delay before marks that the store refused are written again."""


class Ownership:
    """Holds sessions for this process, and closes turns whose calls have failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def settle(self, live: LiveSession) -> None:
        """Updates the tree from the store if necessary. Call it while placing.

        Raises:
            HeldElsewhere: another process holds the session.
            StoreError: a turn of an earlier call is still open, because the store fails.
        """
        if live.closing:
            await asyncio.wait(live.closing, timeout=CLOSE_WAIT_S)
            if live.closing:
                raise StoreError("a turn of this session could not be closed yet; try again")
        while live.stale:
            await self.reload(live)
        if live.unsettled - live.unheld:
            await self._hold(live)

    async def reload(self, live: LiveSession) -> None:
        """Reads the tree again, after a write of another process or a failed write of this one. A
        write that fails meanwhile leaves it stale: what was read may be older."""
        session_id, unread = live.session.session_id, True
        live.stale = False
        try:
            while unread:
                turns = await self._store.get_turns(session_id)
                undelivered = await self._store.undelivered(session_id)
                # A call of this process may have recorded its answer since the turns were read.
                is_open = (turn for turn in turns if turn.status is TurnStatus.OPEN)
                unread = any(live.tree.knows(turn) for turn in is_open)
            live.read(turns, undelivered)
        except BaseException:
            live.stale = True
            raise

    async def _hold(self, live: LiveSession) -> None:
        """Returns when no other process holds the session and the tree has all turns."""
        settled = False
        while not settled:
            known = live.unsettled
            address = await self._store.holder(live.session.session_id)
            if address is not None:
                raise HeldElsewhere(address)
            await self.reload(live)
            settled = live.unsettled <= known
        live.unheld = known

    async def close(self, live: LiveSession, indexes: Iterable[int]) -> None:
        """Closes turns whose call ended without knowing that their answers are recorded, because
        the store or the call failed: see `_close_one`.

        Returns after the first attempt. Further attempts follow until all turns are closed.
        """
        closing = _Closing(live, list(indexes), asyncio.get_running_loop().create_future())
        self._try_to_close(closing)
        await asyncio.wait([closing.tried])

    async def stop(self) -> None:
        """Ends the attempts to close turns. Turns that are still open become CUT when this process
        has ended."""
        self._stopped = True
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _try_to_close(self, closing: _Closing) -> None:
        task = asyncio.create_task(self._close(closing))
        for tasks in (self._closing, closing.live.closing):
            tasks.add(task)
        task.add_done_callback(partial(self._attempted, closing))

    def _attempted(self, closing: _Closing, task: asyncio.Task[None]) -> None:
        """Begins another attempt if this one was ended by an error of any kind."""
        for tasks in (self._closing, closing.live.closing):
            tasks.discard(task)
        if not closing.tried.done():
            closing.tried.set_result(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("turn %d is still open: %s", closing.left[0], error)
        if closing.left and not self._stopped:
            closing.attempts += 1
            self._try_to_close(closing)

    async def _close(self, closing: _Closing) -> None:
        live = closing.live
        live.stale = True
        if closing.attempts:
            await asyncio.sleep(CLOSE_DELAYS_S[min(closing.attempts, len(CLOSE_DELAYS_S)) - 1])
        while closing.left:
            await self._close_one(live.session, closing.left[0])
            live.own.discard(closing.left.pop(0))
            live.stale = True

    async def _close_one(self, session: Session, index: int) -> None:
        """Makes an open turn CUT. An answer that was recorded although its call failed did not
        arrive: no watcher of the call got it."""
        if not await self._store.cut_own_turn(session.session_id, index, session.quota):
            mark = DeliveryMark(session.session_id, index, arrived=False)
            await self._store.mark_deliveries([mark])


@dataclass(slots=True)
class _Closing:
    """Turns that are being closed."""

    live: LiveSession
    left: list[int]
    tried: asyncio.Future[None]
    """Done after the first attempt."""
    attempts: int = 0


class _Pending(msgspec.Struct, frozen=True):
    live: LiveSession
    mark: DeliveryMark


class Deliveries:
    """The marks that are not durable yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: list[_Pending] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def mark(self, live: LiveSession, index: int, *, arrived: bool) -> None:
        """Schedules a mark: whether the answer of turn `index` arrived."""
        mark = DeliveryMark(live.session.session_id, index, arrived)
        self._pending.append(_Pending(live, mark))
        self._schedule(DELAY_S)

    async def flush(self) -> None:
        """Writes all marks so far; those that the store refuses stay pending."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._writing is None and self._pending:
            self._write()
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def close(self) -> None:
        """Writes pending marks, and stops."""
        await self.flush()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, delay_s: float) -> None:
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._write)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending())
            self._writing.add_done_callback(self._written)

    async def _write_pending(self) -> None:
        batch = list(self._pending)
        await self._store.mark_deliveries([pending.mark for pending in batch])
        del self._pending[: len(batch)]
        later = {(each.mark.session_id, each.mark.index) for each in self._pending}
        for pending in batch:
            live, mark = pending.live, pending.mark
            # Its answer may be on its way again to a retry, or have arrived there.
            if (mark.session_id, mark.index) not in later and mark.index not in live.being_sent:
                live.own.discard(mark.index)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        failed = task.cancelled() or task.exception() is not None
        if self._pending:
            self._schedule(RETRY_DELAY_S if failed else DELAY_S)
