"""A store in PostgreSQL, which proxies on several machines can share.

Invariant: a method that writes returns after its transaction was committed. A turn that a dead
proxy left open is read as CUT: each proxy holds an advisory lock on its owner number, and
PostgreSQL releases the lock when the proxy's connection ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, replace
from typing import Any

import asyncpg
import orjson

from proxy.errors import ConfigurationError, SessionError, StoreError
from proxy.records import Reward, ServedPolicy, Session, SessionStatus, Turn, TurnStatus
from proxy.store import migrations, postgres_policies, rows
from proxy.store.postgres_browser import PostgresBrowser
from proxy.store.postgres_owner import CONNECTION_ERRORS, OWNERS_LOCK, PostgresOwner
from proxy.store.protocol import (
    DeliveryMark,
    Durability,
    SessionFilter,
    TurnConflict,
    Undelivered,
)
from proxy.store_address import without_password

SCHEMA_LOCK = 0x61677279
MIGRATION_TIMEOUT_S = 3600.0
"""Limit for one step; creating an index on a large table takes minutes."""

_INTENT = (
    "$1::text, $2::int, $3::int, $4::int, $5::text, $6::bytea, $7::bytea, $8::bytea, $9::text,"
    " $10::text, $11::double precision, $12::bytea, $13::int"
)
_ANSWER = (
    "$1::text, $2::int, $3::text, $4::bytea, $5::bytea, $6::bytea, $7::text, $8::bytea, $9::bytea,"
    " $10::double precision, $11::double precision, $12::text, $13::bytea, $14::bytea"
)
_ANSWER_NAMES = [name.strip() for name in rows.ANSWER_COLUMNS.split(",")]
# FOR SHARE: the session cannot be closed between the check of its status and the insert.
_BEGIN = (
    f"INSERT INTO turns ({rows.INTENT_COLUMNS}, owner) SELECT {_INTENT} FROM sessions"
    " WHERE session_id = $1 AND status = 'open' FOR SHARE ON CONFLICT DO NOTHING"
)
_COMMIT = (
    f"INSERT INTO answers (session_id, idx, {rows.ANSWER_COLUMNS}) SELECT {_ANSWER} FROM turns"
    " WHERE session_id = $1 AND idx = $2 ON CONFLICT (session_id, idx) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _ANSWER_NAMES)
    + f" WHERE {rows.MAY_COMMIT}"
)
_IS_TURN = "SELECT 1 FROM turns WHERE session_id = $1 AND idx = $2"
_SET_STATUS = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT $1::text, $2::int, $3::text, '', '', '', '', '' FROM turns"
    " WHERE session_id = $1 AND idx = $2"
    " ON CONFLICT (session_id, idx) DO UPDATE SET status = excluded.status"
)
_TURNS = (
    f"{rows.lineage('$1::text', least='least')} SELECT {rows.TURN_COLUMNS} FROM lineage l"
    f" JOIN turns t ON {rows.IN_LINEAGE}"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " WHERE t.idx >= $2 AND t.idx < coalesce($3::int, t.idx + 1) ORDER BY t.idx"
)
_REPLAYED = (
    "SELECT d.idx FROM deliveries d JOIN sessions s ON s.session_id = d.session_id"
    " WHERE d.session_id = $1 AND d.idx < s.origin_turn AND d.arrived = 1"
)
# A session cannot be removed while it becomes the origin of a branch. What is read in the same
# transaction after the lock includes what others have written before.
_LOCKED = "SELECT 1 FROM sessions WHERE session_id = $1 FOR UPDATE"
_ORIGIN = (
    "SELECT (SELECT session_id FROM sessions WHERE origin_session = s.session_id"
    " AND origin_salvages = 1) FROM sessions s WHERE session_id = $1"
)
_BRANCHES = "SELECT count(*) FROM sessions WHERE origin_session = $1"
_HELD_ELSEWHERE = (
    "SELECT o.number, o.address FROM turns t JOIN owners o ON o.number = t.owner"
    " LEFT JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = $1 AND t.owner <> $2 AND o.address IS NOT NULL"
    " AND (a.idx IS NULL OR (a.status = 'done' AND d.idx IS NULL))"
)
_UNDELIVERED = (
    "SELECT t.idx, t.owner, d.arrived FROM turns t"
    " JOIN answers a ON a.session_id = t.session_id AND a.idx = t.idx"
    " LEFT JOIN deliveries d ON d.session_id = t.session_id AND d.idx = t.idx"
    " WHERE t.session_id = $1 AND a.status = 'done' AND coalesce(d.arrived, 0) = 0"
)
_MARK = (
    "INSERT INTO deliveries (session_id, idx, arrived) SELECT $1::text, $2::int, $3::int"
    " FROM sessions WHERE session_id = $1"
    " ON CONFLICT (session_id, idx) DO UPDATE SET arrived = excluded.arrived"
)
_CUT = (
    "INSERT INTO answers (session_id, idx, status, sampled_ids, logprobs, versions, answer_key,"
    " answer) SELECT $1::text, $2::int, 'cut', '', '', '', '', '' FROM turns"
    " WHERE session_id = $1 AND idx = $2 AND owner = $3 ON CONFLICT DO NOTHING"
)
_MARKS = (
    f"SELECT session_id, {rows.MARK_COLUMNS} FROM marks WHERE session_id = ANY($1::text[])"
    " ORDER BY at"
)
_TABLES = ("sessions", "turns", "answers", "deliveries", "rewards", "events", "marks")
_UNREFERRED = "NOT EXISTS (SELECT 1 FROM sessions WHERE origin_session = s.session_id)"
# SKIP LOCKED: proxies that remove sessions at the same time remove different ones.
_ENDED = (
    "SELECT session_id FROM sessions s WHERE coalesce(completed_at, expires_at) < $1"
    f" AND {_UNREFERRED}"
    " ORDER BY coalesce(completed_at, expires_at) LIMIT $2 FOR UPDATE SKIP LOCKED"
)
# Again after the lock, because a branch may have begun between the two.
_STILL_UNREFERRED = (
    f"SELECT session_id FROM sessions s WHERE session_id = ANY($1::text[]) AND {_UNREFERRED}"
)
_HELD = (
    "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND classid = $1 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


async def open_postgres(url: str, *, durability: Durability, create: bool) -> PostgresStore:
    """Implements `proxy.store.protocol.OpenStore` for `postgresql://…`."""
    return await PostgresStore.open(url, create=create)


class PostgresStore:
    """Implements `proxy.store.protocol.Store`. Create it with `open`."""

    def __init__(self, pool: asyncpg.Pool, owner: PostgresOwner, url: str) -> None:
        self._pool = pool
        self._owner = owner
        self._url = url
        self.browser = PostgresBrowser(self._fetch)

    @classmethod
    async def open(
        cls, url: str, *, create: bool = True, max_connections: int = 10
    ) -> PostgresStore:
        """Connects, creates the tables in an empty database, and migrates an older layout.

        Raises:
            ConfigurationError: the database cannot be reached, or its layout is newer than this
                version supports.
        """
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=max_connections,
                command_timeout=30.0,
                # Otherwise the last answers are lost when PostgreSQL is killed.
                server_settings={"synchronous_commit": "on"},
            )
            async with AsyncExitStack() as on_error:
                on_error.push_async_callback(pool.close)
                await _migrate(pool, url, create=create)
                store = cls(pool, await PostgresOwner.take(url), url)
                on_error.pop_all()
            return store
        except (*CONNECTION_ERRORS, ValueError) as error:
            raise ConfigurationError(f"store {without_password(url)}: {error}") from error

    async def create_session(self, session: Session) -> bool:
        row = rows.session_row(session)
        marks = ", ".join(f"${n}" for n in range(1, len(row) + 1))
        sql = f"INSERT INTO sessions ({rows.SESSION_COLUMNS}) VALUES ({marks})"
        async with self._connection() as connection, connection.transaction():
            if (origin := session.origin) is not None:
                await connection.execute(_LOCKED, origin.session_id)
                rows.check_origin(origin, await connection.fetchrow(_ORIGIN, origin.session_id))
            done: str = await connection.execute(f"{sql} ON CONFLICT DO NOTHING", *row)
        return not done.endswith(" 0")

    async def get_session(self, session_id: str) -> Session | None:
        return next(iter(await self._sessions("session_id = $1", session_id)), None)

    async def find_by_key(self, key_hash: bytes) -> Session | None:
        return next(iter(await self._sessions("key_hash = $1", key_hash)), None)

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        return await self._sessions(
            "session_id > $1 AND starts_with(session_id, $2)"
            " AND ($3::text IS NULL OR status = $3) AND ($4::text IS NULL OR kind = $4)"
            " AND ($6::text IS NULL OR session_id IN (SELECT session_id FROM marks"
            " WHERE $6 = '*' OR rule = $6)) ORDER BY session_id LIMIT $5",
            where.after or "",
            where.id_prefix,
            where.status.value if where.status else None,
            where.kind.value if where.kind else None,
            where.limit,
            where.marked,
        )

    async def set_status(self, session_id: str, status: SessionStatus, at: float) -> bool:
        """`at` becomes `completed_at`, except if the status is OPEN."""
        return await self._changed(
            "UPDATE sessions SET status = $1, completed_at = $2 WHERE session_id = $3",
            status.value,
            None if status is SessionStatus.OPEN else at,
            session_id,
        )

    async def delete_session(self, session_id: str) -> bool:
        async with self._connection() as connection, connection.transaction():
            await connection.execute(_LOCKED, session_id)
            rows.check_unreferred(session_id, await connection.fetchval(_BRANCHES, session_id))
            done: str = await connection.execute(
                "DELETE FROM sessions WHERE session_id = $1", session_id
            )
            for table in _TABLES[1:]:
                await connection.execute(f"DELETE FROM {table} WHERE session_id = $1", session_id)
        return done != "DELETE 0"

    async def remove_ended(self, before: float, limit: int) -> int:
        async with self._connection() as connection, connection.transaction():
            found = await connection.fetch(_ENDED, before, limit)
            locked = [row[0] for row in found]
            ended = [row[0] for row in await connection.fetch(_STILL_UNREFERRED, locked)]
            for table in _TABLES:
                sql = f"DELETE FROM {table} WHERE session_id = ANY($1::text[])"
                await connection.execute(sql, ended)
        return len(ended)

    async def used_bytes(self) -> int | None:
        return None  # the size of a table includes removed rows until they are vacuumed

    async def begin_turn(self, turn: Turn) -> None:
        owner = await self._owner.number()
        if not await self._changed(_BEGIN, *rows.intent_row(turn), owner):
            await self._refuse_turn(turn)

    async def commit_turn(self, turn: Turn) -> None:
        row = (turn.session_id, turn.index, *rows.answer_row(turn))
        if not await self._changed(_COMMIT, *row):
            found = await self._fetch(_IS_TURN, turn.session_id, turn.index)
            raise rows.unrecorded(turn.session_id, turn.index, exists=bool(found))

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None:
        if not await self._changed(_SET_STATUS, session_id, index, status.value):
            raise rows.unrecorded(session_id, index, exists=False)

    async def cut_own_turn(self, session_id: str, index: int) -> bool:
        return await self._changed(_CUT, session_id, index, await self._owner.number())

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        values = [(mark.session_id, mark.index, int(mark.arrived)) for mark in marks]
        async with self._connection() as connection:
            await connection.executemany(_MARK, values)

    async def undelivered(self, session_id: str) -> Undelivered:
        found = await self._fetch(_UNDELIVERED, session_id)
        replayed = [row[0] for row in await self._fetch(_REPLAYED, session_id)]
        alive = await self._alive() if found else set()
        own = await self._owner.number()
        return rows.undelivered(found, replayed, own=own, alive=alive.__contains__)

    async def get_turns(
        self, session_id: str, since: int = 0, until: int | None = None
    ) -> list[Turn]:
        turns, left_open = [], []
        for row in await self._fetch(_TURNS, session_id, since, until):
            *fields, owner, trained = row
            turns.append(rows.read_in_session(rows.turn_from_row(fields), trained=trained))
            if turns[-1].status is TurnStatus.OPEN:
                left_open.append((len(turns) - 1, owner))
        alive = await self._alive() if left_open else set()
        for at, owner in left_open:
            if owner not in alive:
                turn = turns[at]
                if not await self._changed(_CUT, turn.session_id, turn.index, owner):
                    return await self.get_turns(session_id, since, until)  # recorded meanwhile
                turns[at] = replace(turn, status=TurnStatus.CUT)
        return turns

    async def announce(self, address: str | None) -> None:
        await self._owner.announce(address)

    async def holder(self, session_id: str) -> str | None:
        owner = await self._owner.number()
        found = await self._fetch(_HELD_ELSEWHERE, session_id, owner)
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

    async def publish_policy(self, served: ServedPolicy) -> bool:
        return bool(await self._fetch(postgres_policies.PUBLISH, *astuple(served)))

    async def release_policy(self, name: str, run: str) -> None:
        await self._changed(postgres_policies.RELEASE, name, run)

    def policy_changes(self) -> AsyncGenerator[None]:
        return postgres_policies.changes(self._url)

    async def get_policies(self) -> list[ServedPolicy]:
        return [ServedPolicy(*row) for row in await self._fetch(postgres_policies.CURRENT)]

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
            for row in await self._fetch(_MARKS, list(by_id)):
                by_id[row[0]].marks.append(rows.mark_from_row(tuple(row)[1:]))
        return list(by_id.values())

    async def _alive(self) -> set[int]:
        """The owner numbers of the living processes."""
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
        raise TurnConflict(f"turn {turn.index} of session {turn.session_id} has already begun")

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
            raise StoreError(f"the store failed: {error or type(error).__name__}") from error


async def _migrate(pool: asyncpg.Pool, url: str, *, create: bool) -> None:
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
        layout = 0
        if await connection.fetchval("SELECT to_regclass('agentic_proxy_schema')") is not None:
            layout = await connection.fetchval("SELECT version FROM agentic_proxy_schema")
        elif not create:
            raise ConfigurationError(
                f"store: {without_password(url)} is not a store of the proxy; use the URL in the"
                " proxy's `store` setting"
            )
        for step in migrations.steps("postgres", layout, store=without_password(url)):
            await connection.execute(step.sql, timeout=MIGRATION_TIMEOUT_S)
            await connection.execute("DELETE FROM agentic_proxy_schema")
            sql = "INSERT INTO agentic_proxy_schema (version) VALUES ($1)"
            await connection.execute(sql, step.layout)
