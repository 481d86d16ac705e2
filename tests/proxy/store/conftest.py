"""The stores that the conformance tests run against: each gives a fresh one and a second opener."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from proxy.store import open_store
from proxy.store.protocol import Store

Opener = Callable[[], Awaitable[Store]]


@pytest.fixture(params=["sqlite"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens the same store again and again: each is as another proxy process would see it."""
    opened: list[Store] = []

    async def open_again() -> Store:
        store = await open_store(str(tmp_path / "sessions.sqlite"))
        opened.append(store)
        return store

    yield open_again
    for store in opened:
        await store.close()


@pytest.fixture
async def store(opener: Opener) -> Store:
    return await opener()
