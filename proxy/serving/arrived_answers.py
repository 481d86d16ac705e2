"""Records durably which answers arrived at their agent.

A call marks its turn when the last byte of the answer has been written to the connection, or when
the connection has broken. The marks of all sessions are written together, at most `DELAY_S` later,
so that no call waits for them. Invariant: a turn stays in `LiveSession.own` until its mark is
durable, so that the session stays in memory and other processes forward its calls to this one.
"""

from __future__ import annotations

import asyncio

import msgspec

from proxy.serving.sessions import LiveSession
from proxy.store.protocol import DeliveryMark, Store

DELAY_S = 0.05
"""A killed process loses the marks of this time, and their answers count as not arrived."""
RETRY_DELAY_S = 1.0
"""Delay before marks that the store refused are written again."""


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
