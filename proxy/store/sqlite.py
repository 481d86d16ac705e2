"""The embedded store: one SQLite file in WAL mode with group commit.

Invariant: a method that writes returns after the transaction with its write was committed. With
`durability="process"` a commit survives `kill -9` of the process, but the last commits may be lost
in a power failure (SQLite's synchronous=NORMAL); with `"power"` each commit is fsynced.
Several processes may open one file; a turn that a dead process left open is read as CUT.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

import orjson
from msgspec.structs import replace

from proxy.errors import ConfigurationError, SessionError, StoreError
from proxy.records import (
    Quota,
    RecordedImage,
    Reward,
    ServedPolicy,
    Session,
    SessionStatus,
    Turn,
    TurnStatus,
)
from proxy.settings.state_folder import make_state_folder, state_folder
from proxy.store import quota_rows, rows, sqlite_quotas
from proxy.store import sqlite_statements as statements
from proxy.store.folder_lock import alone_in
from proxy.store.liveness import Liveness
from proxy.store.protocol import (
    DeliveryMark,
    Durability,
    SessionFilter,
    TurnConflict,
    Undelivered,
)
from proxy.store.sqlite_browser import SqliteBrowser
from proxy.store.sqlite_file import (
    connect,
    create_tables,
    is_without_layout,
    limit_size,
    make_file,
    make_private,
    never_wait,
)
from proxy.store.sqlite_group_commit import GroupWriter

T = TypeVar("T")

OF_A_RUN = "sessions.db"
"""The store in the folder of a run, of `eval` and of `collect`."""
SHRUNK_PAGES = 4096
"""Pages freed in one transaction (16 MiB), for which other writes wait."""


async def open_sqlite(url: str, *, durability: Durability, create: bool) -> SqliteStore:
    """Implements `proxy.store.protocol.OpenStore` for `sqlite:///FILE` and for a path: of a file,
    or of a run's folder, which has one."""
    _, separator, rest = url.partition("://")
    file = Path(rest.removeprefix("/") if separator else url)
    if not create and file.is_dir():
        file /= OF_A_RUN
    if not create and not file.is_file():
        raise ConfigurationError(
            f"store: the file {file.absolute()} does not exist; record a session first"
            " (`agentic-proxy run`), or give --store sqlite:///FILE (four slashes before an"
            " absolute path)"
        )
    if not create and is_without_layout(file):
        raise ConfigurationError(
            f"store: the file {file.absolute()} is not a store of sessions, and was not changed;"
            " give --store sqlite:///FILE with the file of a proxy or a run"
        )
    return SqliteStore(file, durability=durability)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What NFS and others answer to a lock without a service for it."""


class SqliteStore:
    """Implements `proxy.store.protocol.Store`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = "process",
        busy_timeout_s: float = 5.0,
        max_pending_writes: int = 10_000,
        max_file_bytes: int | None = None,
    ) -> None:
        """Opens or creates the file.

        Raises:
            ConfigurationError: the file cannot be opened, or is a store of another layout.
        """
        self.path = path
        try:
            if path.parent == state_folder():
                make_state_folder()
            with alone_in(path.parent):
                make_private(path)
                writing = connect(path, durability, busy_timeout_s)
                make_file(writing)
                create_tables(writing, path)
                limit_size(writing, max_file_bytes)
                at_once = None
                if durability == "process":
                    at_once = connect(path, durability, busy_timeout_s)
                    limit_size(at_once, max_file_bytes)
                    never_wait(at_once)
                self._owner = _take_ownership(writing, path)
                self._reading = connect(path, durability, busy_timeout_s)
        except (sqlite3.Error, OSError) as error:
            advice = "use a file in a writable folder"
            if "locked" in str(error):
                advice = f"another process has held it for {busy_timeout_s:g} s: end that, or wait"
            elif isinstance(error, OSError) and error.errno in _NO_LOCKS:
                advice = "its file system has no locks: use a file on a local disk, or PostgreSQL"
            raise ConfigurationError(f"store {path}: {error}; {advice}") from error
        self._writer = GroupWriter(writing, at_once=at_once, max_pending=max_pending_writes)
        self.browser = SqliteBrowser(path, self._writer)
        self._closed = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")

    async def create_session(self, session: Session) -> bool:
        row = rows.session_row(session)

        def create(c: sqlite3.Connection) -> bool:
            if (origin := session.origin) is not None:
                found = c.execute(statements.ORIGIN, (origin.session_id,)).fetchone()
                rows.check_origin(origin, found)
            return c.execute(statements.CREATE, row).rowcount > 0

        return await self._writer.write(create)

    async def get_session(self, session_id: str) -> Session | None:
        return await self._one_session("session_id = ?", session_id)

    async def find_by_key(self, key_hash: bytes) -> Session | None:
        return await self._one_session("key_hash = ?", key_hash)

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        clauses, values = ["session_id > ?"], [where.after or ""]
        if where.id_prefix:
            clauses.append("session_id >= ? AND session_id < ?")
            values += [where.id_prefix, where.id_prefix + "\U0010ffff"]
        if where.status is not None:
            clauses.append("status = ?")
            values.append(where.status.value)
        if where.kind is not None:
            clauses.append("kind = ?")
            values.append(where.kind.value)
        if where.marked is not None:
            clauses.append(f"session_id IN (SELECT session_id FROM marks WHERE {rows.OF_RULE})")
            values += [where.marked, where.marked]
        clause = " AND ".join(clauses) + " ORDER BY session_id LIMIT ?"
        return await self._read(lambda c: _sessions(c, clause, (*values, where.limit)))

    async def set_status(self, session_id: str, status: SessionStatus, at: float) -> bool:
        """`at` becomes `completed_at`, except if the status is OPEN."""
        completed_at = None if status is SessionStatus.OPEN else at
        return await self._changed(
            "UPDATE sessions SET status = ?, completed_at = ? WHERE session_id = ?",
            (status.value, completed_at, session_id),
        )

    async def delete_session(self, session_id: str) -> bool:
        def delete(c: sqlite3.Connection) -> bool:
            (branches,) = c.execute(statements.BRANCHES, (session_id,)).fetchone()
            rows.check_unreferred(session_id, branches)
            return _delete(c, [session_id]) > 0

        return await self._writer.write(delete)

    async def remove_ended(self, before: float, limit: int) -> int:
        """Returns the freed space to the file system at once."""

        def remove(c: sqlite3.Connection) -> int:
            ended = c.execute(statements.ENDED, (before, limit)).fetchall()
            return _delete(c, [session_id for (session_id,) in ended])

        removed = await self._writer.write(remove, may_block=True)
        unused = removed > 0
        while unused:  # in several transactions, so that the writes of calls get in between
            unused = await self._writer.write(_shrink, may_block=True)
        return removed

    async def used_bytes(self) -> int:
        def measure(c: sqlite3.Connection) -> int:
            names = ("page_count", "freelist_count", "page_size")
            pages, unused, page_bytes = (c.execute(f"PRAGMA {n}").fetchone()[0] for n in names)
            return int((pages - unused) * page_bytes)

        return await self._writer.write(measure, may_block=True)

    async def begin_turn(self, turn: Turn, quota: str = "") -> None:
        values = (*rows.intent_row(turn), self._owner.number, turn.session_id)

        def begin(c: sqlite3.Connection) -> None:
            sqlite_quotas.check(c, quota)
            if c.execute(statements.BEGIN, values).rowcount != 1:
                _refuse_turn(c, turn)
            sqlite_quotas.begun(c, quota)

        await self._writer.write(begin)

    async def add_images(self, session_id: str, images: Sequence[RecordedImage]) -> None:
        image_rows = [(i.sha256, i.media_type, i.data) for i in images]

        def add(c: sqlite3.Connection) -> bool:
            for row in image_rows:
                if c.execute(statements.HAS_IMAGE, (row[0], session_id)).rowcount == 0:
                    return False
                c.execute(statements.ADD_IMAGE, row)
            return True

        if not await self._writer.write(add):
            raise rows.no_session(session_id)

    async def get_image(self, sha256: str) -> RecordedImage | None:
        found = await self._read(lambda c: c.execute(statements.IMAGE, (sha256,)).fetchone())
        return None if found is None else rows.image_from_row(found)

    async def commit_turn(self, turn: Turn, quota: str = "") -> None:
        which = (turn.session_id, turn.index)
        values = (*rows.answer_row(turn), *which)

        def commit(c: sqlite3.Connection) -> bool:
            before = sqlite_quotas.counted(c, which, quota)
            if c.execute(statements.COMMIT, values).rowcount == 0:
                return False
            sqlite_quotas.ended(c, turn, before, quota)
            return True

        if not await self._writer.write(commit):
            found = await self._read(lambda c: c.execute(statements.IS_TURN, which).fetchall())
            raise rows.unrecorded(*which, exists=bool(found))

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None:
        if not await self._changed(statements.SET_STATUS, (status.value, session_id, index)):
            raise rows.unrecorded(session_id, index, exists=False)

    async def cut_own_turn(self, session_id: str, index: int, quota: str = "") -> bool:
        which = (session_id, index, self._owner.number)
        return await self._writer.write(lambda c: sqlite_quotas.cut(c, which, quota))

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        values = [(int(mark.arrived), mark.index, mark.session_id) for mark in marks]
        await self._writer.write(lambda c: c.executemany(statements.MARK, values))

    async def undelivered(self, session_id: str) -> Undelivered:
        def read(c: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
            found = c.execute(statements.UNDELIVERED, (session_id,)).fetchall()
            return found, c.execute(statements.REPLAYED, (session_id,)).fetchall()

        found, replayed = await self._read(read)
        indexes = (index for (index,) in replayed)
        return rows.undelivered(found, indexes, own=self._owner.number, alive=self._owner.alive)

    async def get_turns(
        self, session_id: str, since: int = 0, until: int | None = None
    ) -> list[Turn]:
        values = {"id": session_id, "since": since, "until": until}
        found = await self._read(lambda c: c.execute(statements.TURNS, values).fetchall())
        turns = []
        for *row, owner, trained in found:
            turn = rows.read_in_session(rows.turn_from_row(row), trained=bool(trained))
            if turn.status is TurnStatus.OPEN and not self._owner.alive(owner):
                if not await self._cut(turn.session_id, turn.index, owner):  # recorded meanwhile
                    return await self.get_turns(session_id, since, until)
                turn = replace(turn, status=TurnStatus.CUT)
            turns.append(turn)
        return turns

    async def announce(self, address: str | None) -> None:
        sql = "UPDATE owners SET address = ? WHERE number = ?"
        await self._changed(sql, (address, self._owner.number))

    async def others(self) -> list[str]:
        return []

    async def serving(self) -> list[str]:
        query = "SELECT number, address FROM owners WHERE number <> ? AND address IS NOT NULL"
        own = (self._owner.number,)
        found = await self._read(lambda c: c.execute(query, own).fetchall())
        return [address for number, address in found if self._owner.alive(number)]

    async def holder(self, session_id: str) -> str | None:
        query = (session_id, self._owner.number)
        found = await self._read(lambda c: c.execute(statements.HELD_ELSEWHERE, query).fetchall())
        return next((address for number, address in found if self._owner.alive(number)), None)

    async def add_reward(self, session_id: str, reward: Reward) -> bool:
        row = rows.reward_row(reward)
        return bool(await self._added(statements.ADD_REWARD, row, session_id))

    async def set_reward(self, session_id: str, reward: Reward) -> None:
        await self._added(statements.SET_REWARD, rows.reward_row(reward), session_id)

    async def replace_metadata(
        self, session_id: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> bool:
        row = (rows.json_object(after), session_id, rows.json_object(before))
        return await self._changed(
            "UPDATE sessions SET metadata = ? WHERE session_id = ? AND metadata = ?", row
        )

    async def add_event(self, session_id: str, kind: str, data: dict[str, Any]) -> int:
        event = (time.time(), kind, orjson.dumps(data))
        (row,) = await self._added(statements.ADD_EVENT, event, session_id)
        return int(row[0])

    async def get_events(self, session_id: str, since: int = 0) -> list[dict[str, Any]]:
        sql = "SELECT seq, at, kind, data FROM events WHERE session_id = ? AND seq > ? ORDER BY seq"
        found = await self._read(lambda c: c.execute(sql, (session_id, since)).fetchall())
        return [{**orjson.loads(r[3]), "seq": r[0], "at": r[1], "kind": r[2]} for r in found]

    async def publish_policy(self, served: ServedPolicy) -> bool:
        return await self._changed(statements.PUBLISH, astuple(served))

    async def release_policy(self, name: str, run: str) -> None:
        await self._changed(statements.RELEASE, (name, run))

    async def policy_changes(self) -> AsyncGenerator[None]:
        """Yields once: the processes of a proxy send each other what they publish."""
        yield

    async def get_policies(self) -> list[ServedPolicy]:
        found = await self._read(lambda c: c.execute(statements.POLICIES).fetchall())
        return [ServedPolicy(*row) for row in found]

    async def set_quota(
        self, name: str, *, max_turns: int | None, max_tokens: int | None, reset: bool
    ) -> Quota:
        values = (name, max_turns, max_tokens, int(reset))
        return await self._writer.write(lambda c: sqlite_quotas.set_quota(c, values))

    async def remove_quota(self, name: str) -> bool:
        return await self._changed(quota_rows.remove_statement("?"), (name,))

    async def get_quotas(self) -> list[Quota]:
        return await self._read(sqlite_quotas.get_quotas)

    async def close(self) -> None:
        """Commits pending writes, then closes the file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self.browser.close()
        await self._writer.close()
        await asyncio.to_thread(self._reader.shutdown)
        self._reading.close()
        self._owner.release()

    async def _cut(self, session_id: str, index: int, owner: int) -> bool:
        """Closes a turn of a dead process; see `cut_own_turn`."""
        session = await self.get_session(session_id)
        which, quota = (session_id, index, owner), session.quota if session else ""
        return await self._writer.write(lambda c: sqlite_quotas.cut(c, which, quota))

    async def _one_session(self, clause: str, value: str | bytes) -> Session | None:
        found = await self._read(lambda c: _sessions(c, clause, (value,)))
        return found[0] if found else None

    async def _added(self, sql: str, values: Sequence[Any], session_id: str) -> list[Any]:
        """What an insertion into a session returns. Raises SessionError: there is no session."""

        def add(c: sqlite3.Connection) -> list[Any]:
            added = c.execute(sql, (*values, session_id)).fetchall()
            if not added and c.execute(statements.IS_SESSION, (session_id,)).fetchone() is None:
                raise rows.no_session(session_id)
            return added

        return await self._writer.write(add)

    async def _changed(self, sql: str, values: Sequence[Any]) -> bool:
        return await self._writer.write(lambda c: c.execute(sql, values).rowcount > 0)

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reader, query, self._reading)
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreError(f"the store failed to read: {error}") from error


def _take_ownership(connection: sqlite3.Connection, path: Path) -> Liveness:
    row = (os.getpid(), time.time())
    cursor = connection.execute("INSERT INTO owners (pid, started_at) VALUES (?, ?)", row)
    return Liveness(path.with_name(path.name + "-owners"), int(cursor.lastrowid or 0))


def _sessions(c: sqlite3.Connection, clause: str, values: Iterable[Any]) -> list[Session]:
    sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE {clause}"
    by_id = {
        row[0]: rows.session_from_row(row, []) for row in c.execute(sql, tuple(values)).fetchall()
    }
    for batch in _batches(list(by_id), 500):  # SQLite's bound on parameters is higher
        marks = ", ".join("?" * len(batch))
        rewards = f"SELECT session_id, {rows.REWARD_COLUMNS} FROM rewards WHERE session_id IN"
        for row in c.execute(f"{rewards} ({marks}) ORDER BY rowid", batch):
            by_id[row[0]].rewards.append(rows.reward_from_row(row[1:]))
        found = f"SELECT session_id, {rows.MARK_COLUMNS} FROM marks WHERE session_id IN ({marks})"
        for row in c.execute(f"{found} ORDER BY at", batch):
            by_id[row[0]].marks.append(rows.mark_from_row(row[1:]))
    return list(by_id.values())


def _batches(items: list[str], size: int) -> Iterable[list[str]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _refuse_turn(c: sqlite3.Connection, turn: Turn) -> None:
    found = c.execute("SELECT status FROM sessions WHERE session_id = ?", (turn.session_id,))
    row = found.fetchone()
    if row is None:
        raise rows.no_session(turn.session_id)
    if row[0] != SessionStatus.OPEN.value:
        status = 410 if row[0] == SessionStatus.EXPIRED.value else 409
        raise SessionError(f"session {turn.session_id} is {row[0]}", status=status)
    raise TurnConflict(f"turn {turn.index} of session {turn.session_id} has already begun")


def _shrink(c: sqlite3.Connection) -> bool:
    """Returns unused pages to the file system. Returns whether there are more of them."""
    (unused,) = c.execute("PRAGMA freelist_count").fetchone()
    c.execute(f"PRAGMA incremental_vacuum({SHRUNK_PAGES})").fetchall()
    (left,) = c.execute("PRAGMA freelist_count").fetchone()
    return bool(0 < left < unused)


def _delete(c: sqlite3.Connection, session_ids: list[str]) -> int:
    """Returns the number of deleted sessions."""
    marks = ", ".join("?" * len(session_ids))
    images = c.execute(
        f"SELECT DISTINCT sha256 FROM session_images WHERE session_id IN ({marks})", session_ids
    ).fetchall()
    for table in ("turns", "answers", "deliveries", "rewards", "events", "marks", "session_images"):
        c.execute(f"DELETE FROM {table} WHERE session_id IN ({marks})", session_ids)
    for (sha256,) in images:
        c.execute(statements.REMOVE_UNUSED_IMAGE, (sha256,))
    gone = c.execute(f"DELETE FROM sessions WHERE session_id IN ({marks})", session_ids)
    return gone.rowcount
