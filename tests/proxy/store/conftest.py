"""The stores of the conformance tests: each one is empty, and can be opened several times."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from proxy.store import open_store
from proxy.store.protocol import Store
from tests.postgres_server import empty_database

Opener = Callable[[], Awaitable[Store]]


@pytest.fixture(params=["sqlite", "postgres"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the same store several times, as several proxy processes would."""
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
