"""The episodes on disk: SQLite, one thread. What was acknowledged is here, whoever is killed.

Invariant: an episode's reward and its state change in one transaction, and a batch's number is on
all of its episodes or on none. A failed write is `unavailable`, and leaves what was.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.wire import Decider, EpisodeState, EpisodeView

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    number INTEGER PRIMARY KEY,
    episode_id TEXT UNIQUE NOT NULL,
    state TEXT NOT NULL,
    ended_number INTEGER,
    key_hash BLOB NOT NULL,
    view TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state);
CREATE TABLE IF NOT EXISTS deciders (
    episode_id TEXT PRIMARY KEY, decider TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class EpisodeTable:
    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._database = self._thread.submit(_open, path).result()

    async def insert(self, view: EpisodeView, key_hash: bytes) -> None:
        row = (view.episode_id, view.state.value, key_hash, view.model_dump_json())
        await self._do(
            lambda db: db.execute(
                "INSERT INTO episodes (episode_id, state, key_hash, view) VALUES (?, ?, ?, ?)", row
            )
        )

    async def update(self, views: Iterable[EpisodeView]) -> None:
        """All of them or none; those that ended are numbered in that order."""
        rows = [
            (v.state.value, v.model_dump_json(), v.state is EpisodeState.ENDED, v.episode_id)
            for v in views
        ]
        await self._do(lambda db: _update(db, rows))

    async def prepare(self, view: EpisodeView, decider: Decider | None) -> None:
        """The prepared episode, and whom to ask what becomes of it."""
        row = (view.state.value, view.model_dump_json(), False, view.episode_id)
        whom = decider.model_dump_json() if decider else None
        await self._do(lambda db: _update(db, [row], decider=whom))

    async def decider(self, episode_id: str) -> Decider | None:
        row = await self._do(
            lambda db: db.execute(
                "SELECT decider FROM deciders WHERE episode_id = ?", (episode_id,)
            ).fetchone()
        )
        return None if row is None else Decider.model_validate_json(row[0])

    async def change(self, views: Sequence[EpisodeView], **changes: Any) -> None:
        """On disk, and only then in `views` themselves."""
        if not views:
            return
        await self.update([view.model_copy(update=changes) for view in views])
        for view in views:
            for name, value in changes.items():
                setattr(view, name, value)

    async def get(self, episode_id: str) -> tuple[EpisodeView, bytes] | None:
        """The episode and its key's hash."""
        rows = await self._do(
            lambda db: db.execute(
                "SELECT view, key_hash FROM episodes WHERE episode_id = ?", (episode_id,)
            ).fetchall()
        )
        return (EpisodeView.model_validate_json(rows[0][0]), rows[0][1]) if rows else None

    async def in_state(self, *states: EpisodeState, limit: int = -1) -> list[EpisodeView]:
        """In the order in which they ended, then in that of their claims."""
        marks = ",".join("?" * len(states))
        rows = await self._do(
            lambda db: db.execute(
                f"SELECT view FROM episodes WHERE state IN ({marks}) "
                "ORDER BY ended_number IS NULL, ended_number, number LIMIT ?",
                (*states, limit),
            ).fetchall()
        )
        return [EpisodeView.model_validate_json(row[0]) for row in rows]

    async def counts(self) -> dict[str, int]:
        rows = await self._do(
            lambda db: db.execute("SELECT state, count(*) FROM episodes GROUP BY state").fetchall()
        )
        return dict(rows)

    async def remember(self, name: str, value: str) -> None:
        await self._do(
            lambda db: db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
        )

    async def recall(self, name: str) -> str | None:
        row = await self._do(
            lambda db: db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        )
        return None if row is None else str(row[0])

    async def close(self) -> None:
        await self._do(lambda db: db.close())
        self._thread.shutdown()

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, self._database)
        except sqlite3.Error as error:
            raise SwarmError(f"the swarm's disk: {error}", "unavailable") from error


def _open(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.executescript(_SCHEMA)
    return database


def _update(
    database: sqlite3.Connection,
    rows: Sequence[tuple[str, str, bool, str]],
    *,
    decider: str | None = None,
) -> None:
    with _transaction(database):
        _update_rows(database, rows)
        for *_, episode_id in rows:
            database.execute("DELETE FROM deciders WHERE episode_id = ?", (episode_id,))
            if decider is not None:
                database.execute("INSERT INTO deciders VALUES (?, ?)", (episode_id, decider))


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """A failed one (disk full) is rolled back: the next one can begin."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _update_rows(database: sqlite3.Connection, rows: Sequence[tuple[str, str, bool, str]]) -> None:
    for state, view, ended, episode_id in rows:
        database.execute(
            "UPDATE episodes SET state = ?1, view = ?2, ended_number = CASE WHEN ?3 AND "
            "ended_number IS NULL THEN (SELECT ifnull(max(ended_number), 0) + 1 FROM episodes) "
            "ELSE ended_number END WHERE episode_id = ?4",
            (state, view, ended, episode_id),
        )
