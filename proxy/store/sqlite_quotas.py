"""Quotas in a SQLite store, in the transactions of the turns that they count."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from proxy.errors import QuotaReached
from proxy.records import Quota, Turn
from proxy.store import quota_rows
from proxy.store import sqlite_statements as statements

_ALLOWS = f"SELECT 1 FROM quotas WHERE name = ? AND {quota_rows.ALLOWS}"
_BEGUN = "UPDATE quotas SET turns = turns + 1 WHERE name = ?"
_RECORDED = "SELECT length(sampled_ids) FROM answers WHERE session_id = ? AND idx = ?"
_ENDED = (
    f"UPDATE quotas SET turns = {quota_rows.less('turns', '?1')},"
    f" tokens = {quota_rows.less('tokens', '?2')} WHERE name = ?3"
)


def check(c: sqlite3.Connection, quota: str) -> None:
    """Raises QuotaReached."""
    if quota and c.execute(_ALLOWS, (quota,)).fetchone() is None:
        raise QuotaReached(quota)


def begun(c: sqlite3.Connection, quota: str) -> None:
    """Counts a turn that was begun."""
    if quota:
        c.execute(_BEGUN, (quota,))


def counted(c: sqlite3.Connection, which: Sequence[Any], quota: str) -> int | None:
    """The tokens with which a turn's answer is counted; None if it is not. `which`: session and
    index."""
    found = c.execute(_RECORDED, which).fetchone() if quota else None
    return None if found is None else found[0] // quota_rows.TOKEN_BYTES


def ended(c: sqlite3.Connection, turn: Turn, before: int | None, quota: str) -> None:
    """Counts the tokens of a recorded answer, of which `before` were counted."""
    if quota:
        uncounted = before is None and quota_rows.is_uncounted(turn)
        c.execute(_ENDED, (int(uncounted), (before or 0) - len(turn.sampled_ids), quota))


def cut(c: sqlite3.Connection, which: Sequence[Any], quota: str) -> bool:
    """Closes a turn without an answer, which then does not count. Returns whether there was one.
    `which`: session, index and owner."""
    if c.execute(statements.CUT, which).rowcount == 0:
        return False
    if quota:
        c.execute(_ENDED, (1, 0, quota))
    return True


def set_quota(c: sqlite3.Connection, values: Sequence[Any]) -> Quota:
    """`values` are those of `quota_rows.SET`."""
    return Quota(*c.execute(quota_rows.set_statement("?1", "?2", "?3", "?4"), values).fetchone())


def get_quotas(c: sqlite3.Connection) -> list[Quota]:
    return [Quota(*row) for row in c.execute(quota_rows.ALL).fetchall()]
