"""A proxy that is busy when many agents connect."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.config import load_config
from proxy.process import listen
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY

AGENTS = 400
"""More than the 128 connections that asyncio lets wait by default."""


@pytest.fixture
def garbage() -> Iterator[None]:
    """Undoes how `listen` sets up the garbage collection of a process that does nothing else."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("garbage")
async def test_agents_that_connect_while_the_proxy_is_busy_are_answered(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with ScriptedEngine(lambda _: []) as engine:
        config = load_config(
            None,
            model=checkpoint,
            engines=[{"url": engine.url}],
            store=f"sqlite:///{tmp_path}/proxy.db",
            admin_key=ADMIN_KEY,
            port=0,
        )
        async with listen(config) as (_, url, _runner):
            address = urlsplit(url)
            with ExitStack() as stack:
                # The event loop stands still meanwhile, so the proxy accepts none of them.
                agents = [
                    stack.enter_context(
                        socket.create_connection((address.hostname, address.port), timeout=10)
                    )
                    for _ in range(AGENTS)
                ]
                request = f"GET /health HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
                for agent in agents:
                    agent.sendall(request)
                answers = await asyncio.to_thread(lambda: [a.recv(12) for a in agents])
            assert set(answers) == {b"HTTP/1.1 200"}
