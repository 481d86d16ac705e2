"""The client of the control plane."""

from __future__ import annotations

import asyncio

from proxy.client import ProxyClient
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


async def test_wait_for_a_free_connection_is_not_part_of_a_calls_time_limit(
    proxy: RunningProxy,
) -> None:
    async with ProxyClient(proxy.url, ADMIN_KEY) as creating:
        session = await creating.create_session()
    async with ProxyClient(proxy.url, ADMIN_KEY, max_connections=1, timeout_s=0.2) as client:
        holds = asyncio.create_task(client.wait_completed(session.trial_id, timeout_s=60))
        await asyncio.sleep(0)  # it takes the only connection
        waits = asyncio.create_task(client.health())
        ended, _ = await asyncio.wait([waits], timeout=0.6)
        assert not ended
        for task in (holds, waits):
            task.cancel()
        await asyncio.gather(holds, waits, return_exceptions=True)
