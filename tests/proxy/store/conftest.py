"""The stores that the conformance tests run against: each fresh, each opened as often as wanted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from proxy.store import open_store
from proxy.store.protocol import Store
from tests.proxy.store.postgres_server import binaries, postgres_server

Opener = Callable[[], Awaitable[Store]]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server for the test run."""
    programs = binaries()
    if programs is None and os.environ.get("CI"):
        pytest.fail("PostgreSQL is not installed: apt-get install postgresql")
    if programs is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with postgres_server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the same store again and again: each is as another proxy process would see it."""
    url = f"sqlite:///{tmp_path}/sessions.sqlite"
    if request.param == "postgres":
        url = await empty_database(request.getfixturevalue("postgres"))
    opened: list[Store] = []

    async def open_again() -> Store:
        store = await open_store(url)
        opened.append(store)
        return store

    yield open_again
    for store in opened:
        await store.close()


@pytest.fixture
async def store(opener: Opener) -> Store:
    return await opener()


async def empty_database(postgres: str) -> str:
    """URL of a new database on the server."""
    name = f"test_{uuid4().hex}"
    connection = await asyncpg.connect(postgres)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return postgres.rpartition("/")[0] + f"/{name}"
