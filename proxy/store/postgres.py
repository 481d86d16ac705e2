"""The store that several proxies share: PostgreSQL.

Invariant: as SQLite's (`sqlite.py`), with PostgreSQL's own group commit. A turn that a dead proxy
left open is read as CUT: each proxy holds an advisory lock on its owner number for as long as its
connection lives, and PostgreSQL drops the lock with the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Literal

import asyncpg
import orjson

from proxy.errors import ConfigurationError, SessionError, StoreError
from proxy.records import Reward, Session, SessionStatus, Turn, TurnStatus
from proxy.store import rows
from proxy.store.protocol import SessionFilter, TurnConflict

Durability = Literal["process", "power"]

SCHEMA_VERSION = 1
OWNERS_LOCK = 0x61677278
"""First key of our advisory locks; the second is the owner's number."""
SCHEMA_LOCK = 0x61677279
KEEP_ALIVES = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""Of the connection that holds an owner's lock: a machine that vanished is gone after 20 s."""
CONNECTION_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)

_INTENT = (
    "$1::text, $2::int, $3::int, $4::int, $5::text, $6::bytea, $7::bytea, $8::bytea, $9::text,"
    " $10::text, $11::double precision, $12::int"
)
_ANSWER = (
    "$1::text, $2::int, $3::text, $4::bytea, $5::bytea, $6::bytea, $7::text, $8::bytea, $9::bytea,"
    " $10::double precision, $11::double precision"
)
_ANSWER_NAMES = [name.strip() for name in rows.ANSWER_COLUMNS.split(",")]
# FOR SHARE: a session is not closed between the look at its status and the insert.
_BEGIN = (
    f"INSERT INTO turns ({rows.INTENT_COLUMNS}, owner) SELECT {_INTENT} FROM sessions"
    " WHERE session_id = $1 AND status = 'open' FOR SHARE ON CONFLICT DO NOTHING"
)
_COMMIT = (
    f"INSERT INTO answers (session_id, idx, {rows.ANSWER_COLUMNS}) SELECT {_ANSWER} FROM turns"
    " WHERE session_id = $1 AND idx = $2 ON CONFLICT (session_id, idx) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _ANSWER_NAMES)
)
_SET_STATUS = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT $1::text, $2::int, $3::text, '', '', '', '', '' FROM turns"
    " WHERE session_id = $1 AND idx = $2"
    " ON CONFLICT (session_id, idx) DO UPDATE SET status = excluded.status"
)
_TURNS = (
    "SELECT "
    + ", ".join(f"t.{name.strip()}" for name in rows.INTENT_COLUMNS.split(","))
    + ", "
    + ", ".join(f"a.{name}" for name in _ANSWER_NAMES)
    + ", t.owner FROM turns t LEFT JOIN answers a USING (session_id, idx)"
    " WHERE t.session_id = $1 AND t.idx >= $2 ORDER BY t.idx"
)
_OPEN_ELSEWHERE = (
    "SELECT o.number, o.address FROM turns t JOIN owners o ON o.number = t.owner"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " WHERE t.session_id = $1 AND a.idx IS NULL AND t.owner <> $2 AND o.address IS NOT NULL"
)
_HELD = (
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = $1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class PostgresStore:
    """Implements `proxy.store.protocol.Store`; made by `open`."""

    def __init__(self, pool: asyncpg.Pool, owner: _Owner) -> None:
        self._pool = pool
        self._owner = owner

    @classmethod
    async def open(
        cls, url: str, *, durability: Durability = "process", max_connections: int = 10
    ) -> PostgresStore:
        """Connects, and creates the tables in an empty database.

        Raises:
            ConfigurationError: it cannot be reached, or its tables are of another version.
        """
        synchronous = "on" if durability == "power" else "off"
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=max_connections,
                command_timeout=30.0,
                server_settings={"synchronous_commit": synchronous},
            )
            await _create_schema(pool, url)
            return cls(pool, await _Owner.take(url))
        except (*CONNECTION_ERRORS, ValueError) as error:
            raise ConfigurationError(f"store {_without_password(url)}: {error}") from error

    async def create_session(self, session: Session) -> bool:
        row = rows.session_row(session)
        marks = ", ".join(f"${n}" for n in range(1, len(row) + 1))
        return await self._changed(
            f"INSERT INTO sessions ({rows.SESSION_COLUMNS}) VALUES ({marks})"
            " ON CONFLICT DO NOTHING",
            *row,
        )

    async def get_session(self, session_id: str) -> Session | None:
        return next(iter(await self._sessions("session_id = $1", session_id)), None)

    async def find_by_key(self, key_hash: bytes) -> Session | None:
        return next(iter(await self._sessions("key_hash = $1", key_hash)), None)

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        return await self._sessions(
            "session_id > $1 AND starts_with(session_id, $2)"
            " AND ($3::text IS NULL OR status = $3) AND ($4::text IS NULL OR kind = $4)"
            " ORDER BY session_id LIMIT $5",
            where.after or "",
            where.id_prefix,
            where.status.value if where.status else None,
            where.kind.value if where.kind else None,
            where.limit,
        )

    async def set_status(self, session_id: str, status: SessionStatus, at: float) -> bool:
        """`at` becomes `completed_at` unless the session is opened again."""
        return await self._changed(
            "UPDATE sessions SET status = $1, completed_at = $2 WHERE session_id = $3",
            status.value,
            None if status is SessionStatus.OPEN else at,
            session_id,
        )

    async def delete_session(self, session_id: str) -> bool:
        async with self._connection() as connection, connection.transaction():
            done: str = await connection.execute(
                "DELETE FROM sessions WHERE session_id = $1", session_id
            )
            for table in ("turns", "answers", "rewards", "events"):
                await connection.execute(f"DELETE FROM {table} WHERE session_id = $1", session_id)
        return done != "DELETE 0"

    async def begin_turn(self, turn: Turn) -> None:
        owner = await self._owner.number()
        if not await self._changed(_BEGIN, *rows.intent_row(turn), owner):
            await self._refuse_turn(turn)

    async def commit_turn(self, turn: Turn) -> None:
        row = (turn.session_id, turn.index, *rows.answer_row(turn))
        if not await self._changed(_COMMIT, *row):
            raise _unknown_turn(turn.session_id, turn.index)

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None:
        if not await self._changed(_SET_STATUS, session_id, index, status.value):
            raise _unknown_turn(session_id, index)

    async def get_turns(self, session_id: str, since: int = 0) -> list[Turn]:
        found = await self._fetch(_TURNS, session_id, since)
        turns = [rows.turn_from_row(row) for row in found]
        left_open = [
            (turn, row["owner"])
            for turn, row in zip(turns, found, strict=True)
            if turn.status is TurnStatus.OPEN
        ]
        if left_open:
            alive = await self._alive()
            for turn, owner in left_open:
                if owner not in alive:
                    turn.status = TurnStatus.CUT
                    await self.set_turn_status(session_id, turn.index, TurnStatus.CUT)
        return turns

    async def announce(self, address: str | None) -> None:
        await self._owner.announce(address)

    async def holder(self, session_id: str) -> str | None:
        owner = await self._owner.number()
        found = await self._fetch(_OPEN_ELSEWHERE, session_id, owner)
        alive = await self._alive() if found else set()
        return next((address for number, address in found if number in alive), None)

    async def add_reward(self, session_id: str, reward: Reward) -> bool:
        return await self._changed(
            f"INSERT INTO rewards (session_id, {rows.REWARD_COLUMNS})"
            " VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING",
            session_id,
            *rows.reward_row(reward),
        )

    async def add_event(self, session_id: str, kind: str, data: dict[str, Any]) -> int:
        sql = "INSERT INTO events (session_id, at, kind, data) VALUES ($1, $2, $3, $4)"
        event = (session_id, time.time(), kind, orjson.dumps(data))
        (row,) = await self._fetch(f"{sql} RETURNING seq", *event)
        return int(row[0])

    async def get_events(self, session_id: str, since: int = 0) -> list[dict[str, Any]]:
        found = await self._fetch(
            "SELECT seq, at, kind, data FROM events WHERE session_id = $1 AND seq > $2"
            " ORDER BY seq",
            session_id,
            since,
        )
        return [{**orjson.loads(r[3]), "seq": r[0], "at": r[1], "kind": r[2]} for r in found]

    async def close(self) -> None:
        await self._owner.release()
        await self._pool.close()

    async def _sessions(self, clause: str, *values: Any) -> list[Session]:
        sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE {clause}"
        by_id = {row[0]: rows.session_from_row(row, []) for row in await self._fetch(sql, *values)}
        if by_id:
            rewards = await self._fetch(
                f"SELECT session_id, {rows.REWARD_COLUMNS} FROM rewards"
                " WHERE session_id = ANY($1::text[]) ORDER BY seq",
                list(by_id),
            )
            for row in rewards:
                by_id[row[0]].rewards.append(rows.reward_from_row(tuple(row)[1:]))
        return list(by_id.values())

    async def _alive(self) -> set[int]:
        """The numbers of the processes that live."""
        return {row[0] for row in await self._fetch(_HELD, OWNERS_LOCK)}

    async def _refuse_turn(self, turn: Turn) -> None:
        sql = "SELECT status FROM sessions WHERE session_id = $1"
        found = await self._fetch(sql, turn.session_id)
        if not found:
            raise SessionError(f"session {turn.session_id} does not exist", status=404)
        status = found[0][0]
        if status != SessionStatus.OPEN.value:
            code = 410 if status == SessionStatus.EXPIRED.value else 409
            raise SessionError(f"session {turn.session_id} is {status}", status=code)
        raise TurnConflict(f"turn {turn.index} of session {turn.session_id} was begun already")

    async def _changed(self, sql: str, *values: Any) -> bool:
        async with self._connection() as connection:
            done: str = await connection.execute(sql, *values)
        return not done.endswith(" 0")

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        async with self._connection() as connection:
            found: Sequence[Any] = await connection.fetch(sql, *values)
        return found

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncpg.Connection]:
        try:
            async with self._pool.acquire() as connection:
                yield connection
        except CONNECTION_ERRORS as error:
            raise StoreError(f"could not be recorded: {error or type(error).__name__}") from error


class _Owner:
    """Our number among the proxies, and the connection whose life is the lock's."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._taking = asyncio.Lock()
        self._connection: asyncpg.Connection | None = None
        self._number = 0
        self._address: str | None = None

    @classmethod
    async def take(cls, url: str) -> _Owner:
        owner = cls(url)
        await owner._take()
        return owner

    async def number(self) -> int:
        """A new one when the connection was lost: what was begun under the old one is cut."""
        if self._connection is None or self._connection.is_closed():
            async with self._taking:
                if self._connection is None or self._connection.is_closed():
                    try:
                        await self._take()
                    except CONNECTION_ERRORS as error:
                        raise StoreError(f"could not be recorded: {error}") from error
        return self._number

    async def announce(self, address: str | None) -> None:
        self._address = address
        number = await self.number()
        assert self._connection is not None
        try:
            await self._connection.execute(
                "UPDATE owners SET address = $1 WHERE number = $2", address, number
            )
        except CONNECTION_ERRORS as error:
            raise StoreError(f"could not be recorded: {error}") from error

    async def release(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _take(self) -> None:
        connection = await asyncpg.connect(self._url, server_settings=KEEP_ALIVES)
        self._number = await connection.fetchval(
            "INSERT INTO owners (address) VALUES ($1) RETURNING number", self._address
        )
        await connection.execute("SELECT pg_advisory_lock($1, $2)", OWNERS_LOCK, self._number)
        self._connection = connection


async def _create_schema(pool: asyncpg.Pool, url: str) -> None:
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
        if await connection.fetchval("SELECT to_regclass('agentic_proxy_schema')") is None:
            await connection.execute(
                resources.files("proxy.store").joinpath("postgres.sql").read_text()
            )
            sql = "INSERT INTO agentic_proxy_schema (version) VALUES ($1)"
            await connection.execute(sql, SCHEMA_VERSION)
        version = await connection.fetchval("SELECT version FROM agentic_proxy_schema")
        if version == SCHEMA_VERSION:
            await connection.execute("ALTER TABLE owners ADD COLUMN IF NOT EXISTS address TEXT")
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"store {_without_password(url)} has schema version {version}, this program reads"
            f" {SCHEMA_VERSION}: give another database"
        )


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _unknown_turn(session_id: str, index: int) -> SessionError:
    return SessionError(f"session {session_id} has no turn {index}: deleted?", status=404)
