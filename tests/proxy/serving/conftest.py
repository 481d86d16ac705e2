"""Two proxies on one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.postgres_server import empty_database
from tests.proxy.conftest import RunningProxy, StartProxy


@pytest.fixture(params=["sqlite", "postgres"])
async def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return await empty_database(request.getfixturevalue("postgres"))
    return f"sqlite:///{tmp_path}/shared.sqlite"


@pytest.fixture
async def two_proxies(shared_store: str, start_proxy: StartProxy) -> list[RunningProxy]:
    one = await start_proxy(store=shared_store)
    return [one, await start_proxy(store=shared_store, engine=one.engine)]
