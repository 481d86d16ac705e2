"""`SqlBrowser` on PostgreSQL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from proxy.store.sql_browser import SqlBrowser

_OLDEST_RUNNING = """
SELECT known.xid::text FROM (
    SELECT pg_snapshot_xmax(pg_current_snapshot())::xid AS xid
    UNION ALL SELECT backend_xid FROM pg_stat_activity
    WHERE backend_xid IS NOT NULL AND datname = current_database()
) known ORDER BY age(known.xid) DESC LIMIT 1
"""
"""The oldest transaction of this database that writes, or the next one. Transactions of other
databases would hold readers up."""


class PostgresBrowser(SqlBrowser):
    """`fetch` runs a statement on a connection of the store's pool and returns its rows."""

    LOCKED = " FOR KEY SHARE"
    COMMITTED = "age({}.xmin) NOT BETWEEN 0 AND age(CAST(? AS TEXT)::xid)"
    """Rows of more than 2 ** 31 transactions ago have a negative age."""

    def __init__(self, fetch: Callable[..., Awaitable[Sequence[Any]]]) -> None:
        self._fetch_numbered = fetch

    async def _oldest_running(self) -> str:
        """A row's number is taken before its transaction is committed, so that one may appear
        before rows that were read. Those of earlier transactions than this are all there."""
        return str((await self._fetch(_OLDEST_RUNNING))[0][0])

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        return [tuple(row) for row in await self._fetch_numbered(_numbered(sql), *values)]

    async def _change(self, sql: str, *values: Any) -> Sequence[Any]:
        return await self._fetch(sql, *values)


def _numbered(sql: str) -> str:
    """PostgreSQL's form of the placeholders: `$1`, `$2`, … for each `?`."""
    numbers = itertools.count(1)
    return re.sub(r"\?", lambda _: f"${next(numbers)}", sql)
