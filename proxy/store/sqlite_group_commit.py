"""Group commit for SQLite: writes of many calls share a transaction, in the event loop or a thread.

Invariant: the future of a write is resolved only after its transaction has been committed. If the
commit fails, every write in it fails with StoreError, and none is stored.

A commit that waits for nothing takes about 50 µs, and a round trip to a thread several times as
long. Therefore the event loop commits by itself (`at_once`), except in these cases, in which the
thread commits: a write may take long (`may_block`), the file is locked, the commit moves the log
into the database, or a commit was slow within the last `SLOW_FOR_S`. So a disk that stalls stops
the event loop, and with it `/health`, once: at the first commit of the stall.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from proxy.errors import StoreError

T = TypeVar("T")

MAX_BATCH = 256
"""Writes per transaction; with more, one slow commit would delay too many callers."""
MAX_AT_ONCE = 64
"""Writes in a transaction of the event loop."""
COMMITS_PER_CHECKPOINT = 128
"""The thread makes every 128th commit. It then moves the log into the database if the log has
become long (`wal_autocheckpoint`)."""
SLOW_S = 0.02
SLOW_FOR_S = 10.0
"""After a commit in the event loop that took `SLOW_S`, the thread makes all commits for
`SLOW_FOR_S`."""
STALL_S = 0.2
"""After a commit in the thread that took this long, too. It is more than `SLOW_S`, because the
thread makes the large commits and those that move the log."""


class _Write(msgspec.Struct):
    apply: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    may_block: bool
    result: Any = None
    error: Exception | None = None


class GroupWriter:
    """Writes that arrive in one iteration of the event loop, or while the thread commits, share a
    transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        at_once: sqlite3.Connection | None,
        max_pending: int,
    ) -> None:
        """`at_once` is a connection to the same file that never waits and never checkpoints."""
        self._connection = connection
        self._at_once = at_once
        self._committing = threading.Lock()
        self._commits = self._handed_over = self._done = 0
        self._slow_until = 0.0
        self._max_pending = max_pending
        self._pending = 0
        self._gathered: list[_Write] = []
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._ended = False
        """Whether the thread has ended, or takes no more writes because of `close`.
        (`Thread.is_alive` makes ten function calls.)"""
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(
        self, apply: Callable[[sqlite3.Connection], T], *, may_block: bool = False
    ) -> T:
        """Runs `apply` in a transaction and returns its result once the transaction is committed.

        `apply` must not leave a partial write when it raises: it is one statement, or checks
        followed by one. Set `may_block` if `apply` may take long; the thread then runs it.

        Raises:
            StoreError: nothing was stored (locked, full, closed, or too many writes pending).
        """
        if self._pending >= self._max_pending:
            raise StoreError(
                f"the store's write queue is full ({self._pending} of {self._max_pending}); retry"
                " later"
            )
        if self._ended:
            raise StoreError("the store is closed")
        loop = asyncio.get_running_loop()
        write = _Write(apply, loop.create_future(), loop, may_block)
        self._pending += 1
        if not self._gathered:
            loop.call_soon(self._commit_gathered, loop)  # shared by this iteration
        self._gathered.append(write)
        try:
            result: T = await write.future
            return result
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Commits pending writes, then ends the thread."""
        self._ended = True
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._connection.close()
        if self._at_once is not None:
            self._at_once.close()

    def _commit_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._at_once is None or not self._committing.acquire(blocking=False):
            self._hand_over()
            return
        try:
            gathered, begun = self._gathered, time.monotonic()
            if not gathered:  # `close` has handed them over
                return
            self._commits += 1
            if (
                self._handed_over != self._done
                or self._commits % COMMITS_PER_CHECKPOINT == 0
                or begun < self._slow_until
                or len(gathered) > MAX_AT_ONCE
                or any(write.may_block or write.loop is not loop for write in gathered)
            ):
                self._hand_over()
                return
            try:
                _commit(self._at_once, gathered)
            except sqlite3.Error:  # locked, or a failure, which the thread then reports
                self._hand_over()
                return
            self._gathered = []
            now = time.monotonic()
            if now - begun > SLOW_S:
                self._slow_until = now + SLOW_FOR_S
            _resolve(gathered)
        finally:
            self._committing.release()

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._handed_over += 1
            self._queue.put(gathered)

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                batches, closing = self._take()
                batch = [write for gathered in batches for write in gathered]
                for start in range(0, len(batch), MAX_BATCH):
                    part = batch[start : start + MAX_BATCH]
                    begun = time.monotonic()
                    self._commit(part)
                    now = time.monotonic()
                    if now - begun > STALL_S:
                        self._slow_until = now + SLOW_FOR_S
                    _resolve_from_thread(part)
                self._done += len(batches)
        finally:
            self._ended = True

    def _take(self) -> tuple[list[list[_Write]], bool]:
        """Waits for writes, then takes all that are in the queue."""
        batches: list[list[_Write]] = []
        item = self._queue.get()
        while item is not None:
            batches.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batches, False
        return batches, True

    def _commit(self, batch: list[_Write]) -> None:
        try:
            _commit(self._connection, batch)
        except sqlite3.Error as error:
            for write in batch:
                write.error = StoreError(f"the store failed to write: {error}")


def _commit(connection: sqlite3.Connection, batch: list[_Write]) -> None:
    """Commits the whole batch or nothing. Raises sqlite3.Error."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for write in batch:
            write.result = write.error = None
            _apply(connection, write)
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _apply(connection: sqlite3.Connection, write: _Write) -> None:
    try:
        write.result = write.apply(connection)
    except sqlite3.Error:
        raise
    except Exception as error:  # noqa: BLE001 - raised again in the caller
        write.error = error


def _resolve_from_thread(batch: list[_Write]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
    for write in batch:
        by_loop.setdefault(write.loop, []).append(write)
    for loop, writes in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, writes)


def _resolve(writes: list[_Write]) -> None:
    for write in writes:
        if write.future.cancelled():
            continue
        if write.error is not None:
            write.future.set_exception(write.error)
        else:
            write.future.set_result(write.result)
