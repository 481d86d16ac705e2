"""`SqlBrowser` on a SQLite file: reads on a connection and a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proxy.errors import StoreError
from proxy.store.browser import Position
from proxy.store.sql_browser import SqlBrowser
from proxy.store.sqlite_group_commit import GroupWriter

BUSY_TIMEOUT_S = 5.0
CACHE_KIB = 8 * 1024


class SqliteBrowser(SqlBrowser):
    """Opens the file when it is first read."""

    LEAST = "min"

    def __init__(self, path: Path, writer: GroupWriter | None) -> None:
        """`writer` commits changes; None: the file is opened for reading only."""
        self._path = path
        self._writer = writer
        self._connection: sqlite3.Connection | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-browser")

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.shutdown)
        if self._connection is not None:
            self._connection.close()

    async def _may_be_of_this_store(self, position: Position) -> bool:
        used = dict(await self._fetch("SELECT name, seq FROM sqlite_sequence"))
        ends = ((position.begun, "turns"), (position.answered, "answers"))
        return all(seen <= used.get(table, 0) for seen, table in ends)

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reader, self._read, sql, values)
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreError(f"the store failed to read: {error}") from error

    async def _change(self, sql: str, *values: Any) -> Sequence[Any]:
        if self._writer is None:
            raise StoreError(f"the store {self._path} is open for reading only")
        return await self._writer.write(lambda c: c.execute(sql, values).fetchall())

    def _read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        if self._connection is None:
            mode = "ro" if self._writer is None else "rw"
            self._connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode={mode}",
                timeout=BUSY_TIMEOUT_S,
                check_same_thread=False,
                uri=True,
            )
            self._connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._connection.execute("PRAGMA query_only = ON")
        return self._connection.execute(sql, values).fetchall()
