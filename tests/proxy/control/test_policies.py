"""Policies belong to runs, and all proxies on one store learn of new versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from proxy.client import ProxyClientError
from proxy.control import policies
from proxy.control.policies import PublishedPolicies
from proxy.errors import StoreError
from proxy.records import ServedPolicy
from proxy.routing.router import Router
from proxy.store import postgres_policies
from tests.postgres_server import empty_database
from tests.proxy.conftest import RunningProxy, StartProxy


async def versions(proxy: RunningProxy) -> dict[str, int]:
    return {policy.name: policy.version for policy in await proxy.control.policies()}


async def until_published(proxy: RunningProxy, name: str, version: int) -> None:
    async with asyncio.timeout(60):
        while (  # noqa: ASYNC110 (the store notifies the proxy in the background)
            (await versions(proxy)).get(name) != version
        ):
            await asyncio.sleep(0.01)


async def test_policy_of_another_run_is_refused_until_that_run_has_ended(
    proxy: RunningProxy,
) -> None:
    control = proxy.control
    await control.publish_policy("shop", 1, "shop@1.aa", "first-x")
    with pytest.raises(ProxyClientError) as refused:
        await control.publish_policy("shop", 1, "shop@1.bb", "second-y")
    assert refused.value.status == 409
    message = str(refused.value)
    assert "the policy 'shop' belongs to the run 'first-x'; set model.lora.policy" in message
    assert message.endswith("DELETE /policies/shop/runs/first-x")
    await control.publish_policy("shop", 2, "shop@2.aa", "first-x")
    await control.publish_policy("other", 1, "other@1.aa", "second-y")
    assert await versions(proxy) == {"other": 1, "shop": 2}
    await control.release_policy("shop", "first-x")
    await control.publish_policy("shop", 1, "shop@1.bb", "second-y")
    assert await versions(proxy) == {"other": 1, "shop": 1}


async def test_proxy_learns_the_versions_that_another_one_publishes(
    start_proxy: StartProxy, postgres: str
) -> None:
    store = await empty_database(postgres)
    one = await start_proxy(store=store)
    await one.control.publish_policy("planner", 1, "planner@1.aa", "first-x")
    two = await start_proxy(store=store, engine=one.engine)
    assert await versions(two) == {"planner": 1}
    await one.control.publish_policy("planner", 2, "planner@2.bb", "first-x")
    await until_published(two, "planner", 2)
    await two.control.publish_policy("coder", 7, "coder@7.cc", "second-y")
    await until_published(one, "coder", 7)
    with pytest.raises(ProxyClientError, match="belongs to the run 'first-x'"):
        await two.control.publish_policy("planner", 3, "planner@3.dd", "second-y")
    assert await versions(one) == await versions(two) == {"planner": 2, "coder": 7}


async def test_lost_connection_for_notifications_is_replaced(
    start_proxy: StartProxy, postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = await empty_database(postgres)
    one = await start_proxy(store=store)
    two = await start_proxy(store=store, engine=one.engine)
    connection = await asyncpg.connect(store)
    listening = (
        "FROM pg_stat_activity WHERE datname = current_database()"
        f" AND query LIKE 'LISTEN %{postgres_policies.CHANNEL}%'"
    )
    async with asyncio.timeout(60):
        while (  # noqa: ASYNC110 (the proxies connect in the background)
            await connection.fetchval(f"SELECT count(*) {listening}") < 2
        ):
            await asyncio.sleep(0.01)
    with caplog.at_level(logging.WARNING, "proxy.control.policies"):
        await connection.execute(f"SELECT pg_terminate_backend(pid) {listening}")
        await connection.close()
        await one.control.publish_policy("planner", 3, "planner@3.aa")
        await until_published(two, "planner", 3)
    assert "new versions of policies are not seen: the store failed" in caplog.text


async def test_connection_for_notifications_that_is_silent_fails(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a break of the network, of which the connection shows nothing."""
    monkeypatch.setattr(postgres_policies, "CHECK_S", 0.1)
    monkeypatch.setattr(postgres_policies, "ANSWER_S", 0.3)
    server = urlsplit(postgres)
    relays: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
    forwards = asyncio.Event()
    forwards.set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                await forwards.wait()
                writer.write(part)
        finally:
            writer.close()
            await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        relays.put_nowait(own)
        there = await asyncio.open_connection(server.hostname, server.port)
        both = (forward(reader, there[1]), forward(there[0], writer))
        await asyncio.gather(*both, return_exceptions=True)

    between = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    url = server._replace(netloc=f"{server.username}@127.0.0.1:{port}").geturl()
    async with aclosing(postgres_policies.changes(url)) as changes:
        await anext(changes)
        forwards.clear()
        with pytest.raises(StoreError, match="did not answer within 0 s on the connection"):
            await asyncio.wait_for(anext(changes), 30)
    forwards.set()
    async with asyncio.timeout(30):
        for _ in range(2):  # on the second connection asyncpg cancels its request
            await (await relays.get())
    between.close()


class FailsOnce:
    """A store that has a bug the first time that it is asked for changes."""

    def __init__(self) -> None:
        self.failed = False
        self.asked_again = asyncio.Event()

    async def get_policies(self) -> list[ServedPolicy]:
        return []

    async def policy_changes(self) -> AsyncGenerator[None]:
        if not self.failed:
            self.failed = True
            raise AttributeError("no such attribute")
        self.asked_again.set()
        yield


async def test_changes_are_followed_again_after_an_error_that_is_not_the_stores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policies, "RECONNECT_S", 0.01)
    store: Any = FailsOnce()
    async with PublishedPolicies(store, Router([])).followed(), asyncio.timeout(60):
        await store.asked_again.wait()
    assert "new versions of policies are not seen; trying again" in caplog.text
    assert "AttributeError: no such attribute" in caplog.text
