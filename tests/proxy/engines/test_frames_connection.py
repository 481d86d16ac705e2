"""What becomes of the connection of the binary route when its server says nothing."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.engines.address import EngineAddress
from proxy.errors import EngineError
from proxy.extras.binary_route.client import FramesClient
from proxy.extras.binary_route.frames import PATH
from tests.proxy.engines.test_frames import PROMPT, REQUEST, Received


async def test_connection_on_which_a_call_waited_in_vain_is_not_used_again() -> None:
    """A firewall may have forgotten it: then nothing ever comes, not even its end."""
    connections: list[web.WebSocketResponse] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        connections.append(socket)
        async for _ in socket:
            pass
        return socket

    app = web.Application()
    app.router.add_get(PATH, handle)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        client = FramesClient(EngineAddress(url), stall_timeout_s=0.05)
        for _ in range(2):
            assert await client.connect()
            with pytest.raises(EngineError, match="did not answer in time"):
                await client.sample(PROMPT, REQUEST, Received().take)
        await client.close()
    assert len(connections) == 2
