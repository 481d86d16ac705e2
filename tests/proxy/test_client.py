"""The client of the control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy import client as client_module
from proxy.client import ProxyClient, ProxyClientError
from proxy.control import plane
from proxy.records import Reward
from tests.proxy.conftest import ADMIN_KEY, RunningProxy


async def test_call_while_the_client_is_being_closed_opens_a_new_connection(
    proxy: RunningProxy,
) -> None:
    client = ProxyClient(proxy.url, ADMIN_KEY)
    await client.health()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert await client.health() == {"status": "ok"}
    await closing
    await client.close()


@asynccontextmanager
async def silent_proxy() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its URL, and the requests, which it does not answer."""
    requests: list[bytes] = []
    connections: set[asyncio.Task[None]] = set()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        connections.add(own)
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
        await asyncio.gather(*connections, return_exceptions=True)


async def test_wait_for_a_free_connection_is_not_part_of_a_calls_time_limit() -> None:
    async with (
        silent_proxy() as (url, requests),
        ProxyClient(url, ADMIN_KEY, max_connections=1, timeout_s=0.2) as client,
    ):
        ends = await asyncio.gather(*(client.health() for _ in range(3)), return_exceptions=True)
    assert len(requests) == 3
    assert all("did not answer" in str(end) for end in ends)


async def test_wait_for_a_free_connection_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PLACE_TIMEOUT_S", 0.1)
    async with (
        silent_proxy() as (url, _),
        ProxyClient(url, ADMIN_KEY, max_connections=1) as client,
    ):
        holds = asyncio.create_task(client.health())
        await asyncio.sleep(0)  # it takes the only connection
        with pytest.raises(ProxyClientError, match="none of 1 connections") as refused:
            await asyncio.wait_for(client.health(), 30)
        assert refused.value.status == 0
        holds.cancel()
        await asyncio.wait([holds])


async def test_wait_for_the_end_of_a_session_takes_no_connection_from_other_calls(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PLACE_TIMEOUT_S", 5.0)
    async with ProxyClient(proxy.url, ADMIN_KEY, max_connections=1) as client:
        session = await client.create_session()
        waits = asyncio.create_task(client.wait_completed(session.trial_id, timeout_s=60))
        await asyncio.sleep(0)
        await client.complete(session.trial_id)
        assert await waits


async def test_event_of_a_refused_call_with_a_long_name_does_not_end_the_wait_for_a_reward(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    events = proxy.control.events(session.trial_id)
    named = {"type": "function", "function": {"name": "x" * 600_000}}
    body = {"messages": [{"role": "user", "content": "Hi."}], "tool_choice": named}
    status, reply = await proxy.post(session, "chat/completions", body)
    assert status == 400, reply
    async with asyncio.timeout(10):
        assert (await anext(events))["kind"] == "refused"


async def test_key_of_a_reward_that_no_store_can_index_is_refused(proxy: RunningProxy) -> None:
    session = await proxy.session()
    with pytest.raises(ProxyClientError, match="key: ") as refused:
        await proxy.control.add_reward(session.trial_id, Reward("x" * 300_000, 1.0))
    assert refused.value.status == 400


async def test_wait_for_the_end_lasts_longer_than_one_request_may(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane, "MAX_WAIT_S", 0.01)
    session = await proxy.session()
    waiting = asyncio.create_task(proxy.control.wait_completed(session.trial_id, timeout_s=60))
    assert not await proxy.control.wait_completed(session.trial_id, timeout_s=0.1)
    await proxy.control.complete(session.trial_id)
    async with asyncio.timeout(10):
        assert await waiting
