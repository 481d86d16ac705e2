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
