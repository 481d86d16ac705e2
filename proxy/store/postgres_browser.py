"""`SqlBrowser` on PostgreSQL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from proxy.store.sql_browser import SqlBrowser


class PostgresBrowser(SqlBrowser):
    """`fetch` runs a statement on a connection of the store's pool and returns its rows."""

    def __init__(self, fetch: Callable[..., Awaitable[Sequence[Any]]]) -> None:
        self._fetch_numbered = fetch

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        return [tuple(row) for row in await self._fetch_numbered(_numbered(sql), *values)]

    async def _change(self, sql: str, *values: Any) -> Sequence[Any]:
        return await self._fetch(sql, *values)


def _numbered(sql: str) -> str:
    """PostgreSQL's form of the placeholders: `$1`, `$2`, … for each `?`."""
    numbers = itertools.count(1)
    return re.sub(r"\?", lambda _: f"${next(numbers)}", sql)
