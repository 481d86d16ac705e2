"""The scripted engine's own life: what it leaves behind when it is closed."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from proxy.testing.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("killed", [False, True])
async def test_a_connection_that_comes_while_it_closes_is_closed_too(killed: bool) -> None:
    """However many turns the loop has made since the connection came: pytest fails the test for a
    socket that nobody closed."""
    for turns in range(6):
        engine = ScriptedEngine(lambda _: [2])
        url = urlsplit(await engine.start())
        with socket.create_connection((url.hostname, url.port or 0), timeout=10) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            if killed:
                await engine.die()
            await engine.close()
            with suppress(ConnectionResetError):  # so it ends if nobody had accepted it
                assert client.recv(1) == b""
    gc.collect()
