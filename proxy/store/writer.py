"""The one thread that writes to SQLite, committing the writes of many calls in one transaction.

Invariant: the future of a write is resolved only after the transaction that holds it has been
committed; when the commit fails, every write in it fails with StoreError and none is stored.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from proxy.errors import StoreError

T = TypeVar("T")

MAX_BATCH = 256
"""Writes per transaction: past it one slow commit would delay too many callers."""


@dataclass(slots=True)
class _Write:
    apply: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: Exception | None = None


class GroupWriter:
    """Writes that arrive while a transaction is being committed share the next one."""

    def __init__(self, connection: sqlite3.Connection, *, max_pending: int) -> None:
        self._connection = connection
        self._max_pending = max_pending
        self._pending = 0
        self._gathered: list[_Write] = []
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    async def write(self, apply: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `apply` inside a transaction, returns its result once that is committed.

        `apply` must leave nothing behind when it raises: one statement, or checks before it.

        Raises:
            StoreError: nothing was stored (locked, full, closed, or too many writes pending).
        """
        if self._pending >= self._max_pending:
            raise StoreError(f"{self._pending} writes wait for the store, the bound is reached")
        if not self._thread.is_alive():
            raise StoreError("the store is closed")
        loop = asyncio.get_running_loop()
        write = _Write(apply, loop.create_future(), loop)
        self._pending += 1
        if not self._gathered:
            loop.call_soon(self._hand_over)  # one waking of the thread for all calls of this turn
        self._gathered.append(write)
        try:
            result: T = await write.future
            return result
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Commits what is queued, then ends the thread."""
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._connection.close()

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._queue.put(gathered)

    def _run(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            for start in range(0, len(batch), MAX_BATCH):
                part = batch[start : start + MAX_BATCH]
                self._commit(part)
                _resolve_from_thread(part)

    def _take(self) -> tuple[list[_Write], bool]:
        """Blocks for writes, then takes what else is there already."""
        batch: list[_Write] = []
        item = self._queue.get()
        while item is not None:
            batch += item
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit(self, batch: list[_Write]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for write in batch:
                self._apply(write)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            for write in batch:
                write.error = StoreError(f"could not be recorded: {error}")

    def _apply(self, write: _Write) -> None:
        try:
            write.result = write.apply(self._connection)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - handed to the caller, whose error it is
            write.error = error

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


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
