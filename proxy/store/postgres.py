"""A store in PostgreSQL, which proxies on several machines can share.

Invariant: a method that writes returns after its transaction was committed. A turn that a dead
proxy left open is read as CUT: each proxy holds an advisory lock on its owner number, and
PostgreSQL releases the lock when the proxy's connection ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple
from typing import Any

import asyncpg
import orjson
from msgspec.structs import replace

from proxy.errors import ConfigurationError, QuotaReached, SessionError, StoreError
from proxy.machine.secrecy import without_password
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
from proxy.store import layout, postgres_policies, postgres_quotas, quota_rows, rows
from proxy.store import postgres_statements as statements
from proxy.store.postgres_browser import PostgresBrowser
from proxy.store.postgres_owner import (
    CONNECTION_ERRORS,
    OWNERS_LOCK,
    PostgresOwner,
    patiently,
)
from proxy.store.protocol import (
    DeliveryMark,
    Durability,
    SessionFilter,
    TurnConflict,
    Undelivered,
)

SCHEMA_LOCK = 0x61677279
IMAGES_LOCK = 0x6167727A


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
        """Connects, and creates the tables in an empty database.

        Raises:
            ConfigurationError: the database cannot be reached, or is a store of another layout.
        """
        logging.getLogger("asyncpg.pool").addFilter(_in_one_line)  # once, however often it is added
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
                await _create_tables(pool, url, create=create)
                store = cls(pool, await PostgresOwner.take(url), url)
                on_error.pop_all()
            return store
        except (*CONNECTION_ERRORS, ValueError) as error:
            hint = ""
            if isinstance(error, asyncpg.InvalidPasswordError) and url == without_password(url):
                hint = "; the URL has none: name its file in AGENTIC_PROXY_STORE_PASSWORD_FILE"
            raise ConfigurationError(f"store {without_password(url)}: {error}{hint}") from error

    async def create_session(self, session: Session) -> bool:
        row = rows.session_row(session)
        marks = ", ".join(f"${n}" for n in range(1, len(row) + 1))
        sql = f"INSERT INTO sessions ({rows.SESSION_COLUMNS}) VALUES ({marks})"
        async with self._connection() as connection, connection.transaction():
            if (origin := session.origin) is not None:
                await connection.execute(statements.LOCKED, origin.session_id)
                rows.check_origin(
                    origin, await connection.fetchrow(statements.ORIGIN, origin.session_id)
                )
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
            await connection.execute(statements.LOCKED, session_id)
            rows.check_unreferred(
                session_id, await connection.fetchval(statements.BRANCHES, session_id)
            )
            done: str = await connection.execute(
                "DELETE FROM sessions WHERE session_id = $1", session_id
            )
            await _delete_rows(connection, [session_id], statements.TABLES[1:])
        return done != "DELETE 0"

    async def remove_ended(self, before: float, limit: int) -> int:
        async with self._connection() as connection, connection.transaction():
            found = await connection.fetch(statements.ENDED, before, limit)
            locked = [row[0] for row in found]
            ended = [row[0] for row in await connection.fetch(statements.STILL_UNREFERRED, locked)]
            await _delete_rows(connection, ended, statements.TABLES)
        return len(ended)

    async def used_bytes(self) -> int | None:
        return None  # the size of a table includes removed rows until they are vacuumed

    async def begin_turn(self, turn: Turn, quota: str = "") -> None:
        row = (*rows.intent_row(turn), await self._owner.number())
        if not quota:
            if not await self._changed(statements.BEGIN, *row):
                await self._refuse_turn(turn)
            return
        ((counted, begun),) = await self._fetch(postgres_quotas.BEGIN, *row, quota)
        if not counted:
            raise QuotaReached(quota)
        if not begun:
            await self._changed(postgres_quotas.GIVE_BACK, quota)
            await self._refuse_turn(turn)

    async def add_images(self, session_id: str, images: Sequence[RecordedImage]) -> None:
        async with self._connection() as connection, connection.transaction():
            await connection.execute(statements.ADDING_IMAGES, IMAGES_LOCK)
            for image in images:
                added = await connection.execute(statements.HAS_IMAGE, session_id, image.sha256)
                if added.endswith(" 0"):
                    raise rows.no_session(session_id)
                row = (image.sha256, image.media_type, image.data)
                await connection.execute(statements.ADD_IMAGE, *row)

    async def get_image(self, sha256: str) -> RecordedImage | None:
        found = await self._fetch(statements.IMAGE, sha256)
        return rows.image_from_row(found[0]) if found else None

    async def commit_turn(self, turn: Turn, quota: str = "") -> None:
        row = (turn.session_id, turn.index, *rows.answer_row(turn))
        if not quota:
            recorded = await self._changed(statements.COMMIT, *row)
        else:
            given = (*row, quota, quota_rows.is_uncounted(turn))
            recorded = bool((await self._fetch(postgres_quotas.COMMIT, *given))[0][0])
        if not recorded:
            found = await self._fetch(statements.IS_TURN, turn.session_id, turn.index)
            raise rows.unrecorded(turn.session_id, turn.index, exists=bool(found))

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None:
        if not await self._changed(statements.SET_STATUS, session_id, index, status.value):
            raise rows.unrecorded(session_id, index, exists=False)

    async def cut_own_turn(self, session_id: str, index: int, quota: str = "") -> bool:
        return await self._cut(session_id, index, await self._owner.number(), quota)

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        values = [(mark.session_id, mark.index, int(mark.arrived)) for mark in marks]
        async with self._connection() as connection:
            await connection.executemany(statements.MARK, values)

    async def undelivered(self, session_id: str) -> Undelivered:
        found = await self._fetch(statements.UNDELIVERED, session_id)
        replayed = [row[0] for row in await self._fetch(statements.REPLAYED, session_id)]
        alive = await self._alive() if found else set()
        own = await self._owner.number()
        return rows.undelivered(found, replayed, own=own, alive=alive.__contains__)

    async def get_turns(
        self, session_id: str, since: int = 0, until: int | None = None
    ) -> list[Turn]:
        turns, left_open = [], []
        for row in await self._fetch(statements.TURNS, session_id, since, until):
            *fields, owner, trained = row
            turns.append(rows.read_in_session(rows.turn_from_row(fields), trained=trained))
            if turns[-1].status is TurnStatus.OPEN:
                left_open.append((len(turns) - 1, owner))
        alive = await self._alive() if left_open else set()
        for at, owner in left_open:
            if owner not in alive:
                turn = turns[at]
                session = await self.get_session(turn.session_id)
                quota = session.quota if session else ""
                if not await self._cut(turn.session_id, turn.index, owner, quota):
                    return await self.get_turns(session_id, since, until)  # recorded meanwhile
                turns[at] = replace(turn, status=TurnStatus.CUT)
        return turns

    async def announce(self, address: str | None) -> None:
        await self._owner.announce(address)

    async def others(self) -> list[str]:
        owner = await self._owner.number()
        found = await self._fetch(
            "SELECT number, address FROM owners WHERE number <> $1 AND address IS NOT NULL", owner
        )
        alive = await self._alive() if found else set()
        return [address for number, address in found if number in alive]

    async def serving(self) -> list[str]:
        return await self.others()

    async def holder(self, session_id: str) -> str | None:
        owner = await self._owner.number()
        found = await self._fetch(statements.HELD_ELSEWHERE, session_id, owner)
        alive = await self._alive() if found else set()
        return next((address for number, address in found if number in alive), None)

    async def add_reward(self, session_id: str, reward: Reward) -> bool:
        row = rows.reward_row(reward)
        return bool(await self._added(statements.ADD_REWARD, row, session_id))

    async def set_reward(self, session_id: str, reward: Reward) -> None:
        await self._added(statements.SET_REWARD, rows.reward_row(reward), session_id)

    async def replace_metadata(
        self, session_id: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> bool:
        return await self._changed(
            "UPDATE sessions SET metadata = $1 WHERE session_id = $2 AND metadata = $3",
            rows.json_object(after),
            session_id,
            rows.json_object(before),
        )

    async def add_event(self, session_id: str, kind: str, data: dict[str, Any]) -> int:
        event = (time.time(), kind, orjson.dumps(data))
        (row,) = await self._added(statements.ADD_EVENT, event, session_id)
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

    async def set_quota(
        self, name: str, *, max_turns: int | None, max_tokens: int | None, reset: bool
    ) -> Quota:
        values = (name, max_turns, max_tokens, int(reset))
        (row,) = await self._fetch(postgres_quotas.SET, *values)
        return Quota(*row)

    async def remove_quota(self, name: str) -> bool:
        return await self._changed(quota_rows.remove_statement("$1"), name)

    async def get_quotas(self) -> list[Quota]:
        return [Quota(*row) for row in await self._fetch(quota_rows.ALL)]

    async def close(self) -> None:
        await self._owner.release()
        await self._pool.close()

    async def _cut(self, session_id: str, index: int, owner: int, quota: str) -> bool:
        if not quota:
            return await self._changed(statements.CUT, session_id, index, owner)
        return bool((await self._fetch(postgres_quotas.CUT, session_id, index, owner, quota))[0][0])

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
            for row in await self._fetch(statements.MARKS, list(by_id)):
                by_id[row[0]].marks.append(rows.mark_from_row(tuple(row)[1:]))
        return list(by_id.values())

    async def _added(self, sql: str, values: Sequence[Any], session_id: str) -> Sequence[Any]:
        """What an insertion into a session returns. Raises SessionError: there is no session."""
        added = await self._fetch(sql, *values, session_id)
        if not added and not await self._fetch(statements.IS_SESSION, session_id):
            raise rows.no_session(session_id)
        return added

    async def _alive(self) -> set[int]:
        """The owner numbers of the living processes."""
        return {row[0] for row in await self._fetch(statements.HELD, OWNERS_LOCK)}

    async def _refuse_turn(self, turn: Turn) -> None:
        sql = "SELECT status FROM sessions WHERE session_id = $1"
        found = await self._fetch(sql, turn.session_id)
        if not found:
            raise rows.no_session(turn.session_id)
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
            connection = await patiently(self._pool.acquire)
            try:
                yield connection
            finally:
                await self._pool.release(connection)
        except CONNECTION_ERRORS as error:
            raise StoreError(f"the store failed: {error or type(error).__name__}") from error


async def _delete_rows(
    connection: asyncpg.Connection, session_ids: Sequence[str], tables: Sequence[str]
) -> None:
    """Deletes the sessions' rows in these tables, and images that no other session has."""
    await connection.execute(statements.REMOVING_IMAGES, IMAGES_LOCK)
    gone = await connection.fetch(statements.REMOVE_SESSION_IMAGES, session_ids)
    images = sorted({row[0] for row in gone})
    for table in tables:
        sql = f"DELETE FROM {table} WHERE session_id = ANY($1::text[])"
        await connection.execute(sql, session_ids)
    if images:
        await connection.execute(statements.REMOVE_UNUSED_IMAGES, images)


def _in_one_line(record: logging.LogRecord) -> bool:
    """The pool logs a traceback each time that it cannot connect, while PostgreSQL starts again."""
    if record.exc_info:
        record.msg = f"{record.getMessage()}: {record.exc_info[1]}"
        record.args, record.exc_info, record.exc_text = (), None, None
    return True


async def _create_tables(pool: asyncpg.Pool, url: str, *, create: bool) -> None:
    """Creates the tables in an empty database, in one transaction.

    Raises:
        ConfigurationError: the database is a store of another layout, or `create` is False and it
            is no store.
    """
    name = without_password(url)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
        if await connection.fetchval("SELECT to_regclass('agentic_proxy_schema')") is not None:
            # Tables of layouts before 14 have no column `written_by`.
            found = await connection.fetchrow("SELECT * FROM agentic_proxy_schema")
            layout.check(found["version"], found.get("written_by"), store=name)
        elif not create:
            raise ConfigurationError(
                f"store: {name} is not a store of the proxy; use the URL in the proxy's `store`"
                " setting"
            )
        else:
            await connection.execute(layout.script("postgres"))
            sql = "INSERT INTO agentic_proxy_schema VALUES ($1, $2)"
            await connection.execute(sql, layout.LAYOUT, layout.this_version())
