"""A vLLM server of the run on this machine, which can be started again after it has ended.

A node of a relay worker has one, too, and nothing else of the trainer: it loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmServer
from trainer.errors import TrainerError

HEALTH_INTERVAL_S = 1.0
"""Seconds between two health checks; a check takes the server less than a millisecond."""
HEALTH_TIMEOUT_S = 10.0

MakeServer = Callable[..., VllmServer]
"""A new server for each start; takes the keyword arguments of `VllmServer`."""


async def until_engine_is_dead(url: str) -> str:
    """Returns how it is known, when a server that has answered reports that its engine process is
    dead (503 at `/health`), or does not listen any more: vLLM then still waits for requests that
    its dead engine never answers. A server that listens and does not answer may be busy; if its
    process ends, this is noticed in another way."""
    address = EngineAddress.parse(url)
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=address.headers) as session:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            try:
                async with session.get(f"{address.url}/health") as answer:
                    if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                        return "its engine process died, "
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, ConnectionRefusedError):
                    return "it closed its port, "
            except (aiohttp.ClientError, TimeoutError):
                pass


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


class LocalReplica:
    """Example: replica = LocalReplica(replica_server(config, folder, 0))"""

    def __init__(self, make_server: MakeServer) -> None:
        self._make_server = make_server
        self._server: VllmServer | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = self._make_server()
        await self._server.start()
        self.url = self._server.url

    async def wait(self) -> str:
        if self._server is None:
            raise TrainerError("the engine was not started")
        ended = asyncio.create_task(self._server.wait())
        answers = self._server.answers
        dead = asyncio.create_task(until_engine_is_dead(self.url) if answers else _never())
        try:
            await asyncio.wait({ended, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # vLLM would wait for calls that its dead engine never answers
                await self._server.stop()
            how = dead.result() if dead.done() else ""
            code, words = await ended, self._server.last_words()
            return f"{how}exit code {code}: {words} (log: {self._server.log})"
        finally:
            for task in (ended, dead):
                task.cancel()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
