"""A store of each layout is migrated when it is opened, and keeps its records."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import asyncpg
import pytest
from msgspec.structs import replace

from proxy.errors import ConfigurationError
from proxy.records import Reward, SessionStatus, TurnStatus
from proxy.store import migrations, open_store
from proxy.store.protocol import Store
from tests.postgres_server import empty_database
from tests.proxy.store.test_conformance import a_session, an_intent, answered, assert_same

DUMPS = Path(__file__).parent / "layouts"
"""The dumps that `dump_layout.py` wrote with the first version of each layout."""
NEWEST = migrations.steps("sqlite", 0, store="")[-1].layout
LAYOUTS = range(1, NEWEST + 1)


@dataclass(frozen=True)
class Database:
    """An empty database, and direct access to it."""

    name: migrations.Database
    url: str
    execute: Callable[[str], Awaitable[object]]

    async def load(self, layout: int) -> None:
        await self.execute((DUMPS / f"{self.name}_{layout}.sql").read_text())

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        store = await open_store(self.url)
        yield store
        await store.close()


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        file = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)

        async def execute(sql: str) -> object:
            return file.executescript(sql)

        yield Database("sqlite", f"sqlite:///{tmp_path}/s.sqlite", execute)
        file.close()
    else:
        url = await empty_database(request.getfixturevalue("postgres"))
        connection = await asyncpg.connect(url)
        yield Database("postgres", url, connection.execute)
        await connection.close()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_store_of_each_layout_keeps_its_records(database: Database, layout: int) -> None:
    await database.load(layout)
    async with database.opened() as store:
        await assert_holds_the_dumped_records(store)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_migrated_store_can_be_opened_again_and_written_to(
    database: Database, layout: int
) -> None:
    await database.load(layout)
    async with database.opened() as one, database.opened() as two:
        await one.announce("http://one")
        await one.begin_turn(an_intent(index=3))
        assert await two.holder("task/7-a") == "http://one"
        await one.commit_turn(answered(an_intent(index=3)))
    async with database.opened() as store:
        turns = await store.get_turns("task/7-a")
        assert [turn.status for turn in turns][2:] == [TurnStatus.CUT, TurnStatus.DONE]
        assert_same(turns[3], answered(an_intent(index=3)))


async def test_owners_in_the_first_layouts_have_no_address(database: Database) -> None:
    await database.load(1)
    await database.execute("ALTER TABLE owners DROP COLUMN address")
    async with database.opened() as store:
        await store.announce("http://here")
        await assert_holds_the_dumped_records(store)


async def test_store_with_a_newer_layout_is_refused_with_instructions(database: Database) -> None:
    await database.load(1)
    await database.execute(
        "PRAGMA user_version = 99"
        if database.name == "sqlite"
        else "UPDATE agentic_proxy_schema SET version = 99"
    )
    with pytest.raises(ConfigurationError, match=r"has layout 99, .* up to \d+; install"):
        await open_store(database.url)


def test_both_databases_have_the_same_layouts_and_a_dump_of_each() -> None:
    known = {
        name: [step.layout for step in migrations.steps(name, 0, store="")]
        for name in ("sqlite", "postgres")
    }
    assert known["sqlite"] == known["postgres"] == list(range(1, NEWEST + 1))
    dumped = {file.name for file in DUMPS.glob("*.sql")}
    assert dumped == {f"{name}_{layout}.sql" for name in known for layout in LAYOUTS}
    assert resources.files(migrations).joinpath("sqlite_1.sql").is_file()


async def assert_holds_the_dumped_records(store: Store) -> None:
    session = await store.get_session("task/7-a")
    reward = Reward(key="verifier", value=1.0, parts={"tests": 0.5})
    assert session == a_session(rewards=[reward])
    other = await store.get_session("task/7-b")
    assert other == a_session("task/7-b", status=SessionStatus.COMPLETED, completed_at=50.0)
    turns = await store.get_turns("task/7-a")
    expected = [answered(an_intent()), answered(an_intent(index=1))]
    expected.append(replace(an_intent(index=2), status=TurnStatus.CUT))
    for turn, wanted in zip(turns, expected, strict=True):
        assert_same(turn, wanted)
    (event,) = await store.get_events("task/7-a")
    assert (event["seq"], event["kind"], event["status"]) == (1, "refused", 400)
