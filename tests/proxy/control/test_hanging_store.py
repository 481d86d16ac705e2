"""A store that does not answer: probes and scrapes are answered all the same."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from proxy.control import plane
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import ADMIN_KEY, RunningProxy


async def test_readiness_and_metrics_do_not_wait_for_a_store_that_hangs(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    assert await proxy.control.ready()
    monkeypatch.setattr(plane, "STORE_S", 0.05)
    monkeypatch.setattr(SqliteStore, "list_sessions", hang)
    monkeypatch.setattr(SqliteStore, "used_bytes", hang)
    async with asyncio.timeout(60), proxy.http.get(f"{proxy.url}/ready") as answer:
        assert answer.status == 503
        assert "the store did not answer" in await answer.text()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        asyncio.timeout(60),
        proxy.http.get(f"{proxy.url}/metrics", headers=headers) as answer,
    ):
        assert answer.status == 200
        assert "agentic_proxy_in_flight_calls" in await answer.text()
