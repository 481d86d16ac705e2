"""A store of another layout is refused unchanged, with its version and what to do."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import asyncpg
import pytest

from proxy.errors import ConfigurationError
from proxy.store import layout, open_store
from tests.postgres_server import empty_database

Rows = list[tuple[object, ...]]
_SCHEMA = "SELECT version, written_by FROM agentic_proxy_schema"


@dataclass(frozen=True)
class Database:
    """A database without tables, and direct access to it."""

    name: str
    url: str
    execute: Callable[[str], Awaitable[Rows]]

    async def record_layout(self, number: int) -> None:
        if self.name == "sqlite":
            await self.execute(f"PRAGMA user_version = {number}")
        else:
            await self.execute(f"UPDATE agentic_proxy_schema SET version = {number}")

    async def refusal(self) -> str:
        with pytest.raises(ConfigurationError) as raised:
            await open_store(self.url)
        return str(raised.value)


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        file = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)

        async def execute(sql: str) -> Rows:
            return file.execute(sql).fetchall()

        yield Database("sqlite", f"sqlite:///{tmp_path}/s.sqlite", execute)
        file.close()
    else:
        url = await empty_database(request.getfixturevalue("postgres"))
        connection = await asyncpg.connect(url)

        async def fetch(sql: str) -> Rows:
            return [tuple(row) for row in await connection.fetch(sql)]

        yield Database("postgres", url, fetch)
        await connection.close()


async def test_store_records_its_layout_and_the_version_that_created_it(database: Database) -> None:
    for _ in range(2):  # the second process finds the tables
        store = await open_store(database.url)
        await store.close()
        rows = await database.execute(_SCHEMA)
        assert rows == [(layout.LAYOUT, metadata.version("agentic-rl"))]


async def test_older_store_is_refused_with_its_version_and_what_to_do(database: Database) -> None:
    store = await open_store(database.url)
    await store.close()
    await database.execute("UPDATE agentic_proxy_schema SET written_by = '0.0.7'")
    await database.record_layout(layout.LAYOUT - 1)
    message = await database.refusal()
    assert f"layout {layout.LAYOUT - 1} and was created by agentic-rl 0.0.7; this" in message
    assert "run `agentic-proxy export --format records` with agentic-rl 0.0.7" in message
    assert "set `store` to a new file or database" in message


async def test_store_without_a_recorded_version_is_of_0_1_0_and_unchanged(
    database: Database,
) -> None:
    await database.execute("CREATE TABLE sessions (session_id TEXT PRIMARY KEY)")
    if database.name == "postgres":
        await database.execute("CREATE TABLE agentic_proxy_schema (version INTEGER NOT NULL)")
        await database.execute("INSERT INTO agentic_proxy_schema VALUES (0)")
    await database.record_layout(7)
    assert "has layout 7 and was created by agentic-rl 0.1.0; this" in await database.refusal()
    assert await database.execute("SELECT * FROM sessions") == []
    with pytest.raises((sqlite3.OperationalError, asyncpg.UndefinedTableError)):
        await database.execute("SELECT * FROM turns")


async def test_newer_store_is_refused_with_its_version(database: Database) -> None:
    store = await open_store(database.url)
    await store.close()
    await database.execute("UPDATE agentic_proxy_schema SET written_by = '9.8.7'")
    await database.record_layout(99)
    message = await database.refusal()
    assert "has layout 99 and was created by agentic-rl 9.8.7; this" in message


def test_both_scripts_create_the_same_tables_and_columns() -> None:
    sqlite, postgres = (_columns(layout.script(name)) for name in ("sqlite", "postgres"))
    assert postgres - sqlite == set()
    assert sqlite - postgres == {("owners", "pid")}


def _columns(script: str) -> set[tuple[str, str]]:
    """Each column as (table, column)."""
    return {
        (table, column)
        for table, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\)", script, re.DOTALL)
        for column in re.findall(r"^    ([a-z]\w*)", body, re.MULTILINE)
    }
