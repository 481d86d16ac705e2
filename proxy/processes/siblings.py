"""The other processes of this proxy, where several serve one port (`--workers N`).

Sessions need nothing of this: the store is the truth, and each process reads it. What is no record
(pauses, engines, the policy's version, calls in flight of a session that was ended) is told to the
others; metrics and events are gathered from them. Invariant: when `tell` returns, every sibling
that listens has done it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

TOLD = "X-Agentic-Proxy-Told"
"""On what a sibling tells, so that it goes no further."""
TIMEOUT_S = 10.0


class Siblings:
    """Each process listens on a Unix socket in a folder that only its user may enter."""

    def __init__(self, sockets: Sequence[Path] = ()) -> None:
        self._sockets = {str(path): path for path in sockets}

    @property
    def names(self) -> list[str]:
        return list(self._sockets)

    async def tell(self, request: web.Request) -> None:
        """Makes the same control call at every sibling.

        Raises:
            aiohttp.ClientResponseError: one of them refused.
        """
        await self.ask(request)

    async def ask(self, request: web.Request) -> list[bytes]:
        """What every sibling that listens answers to the same call; nothing to a sibling's."""
        if told_by_sibling(request):
            return []
        body = await request.read()
        answers = await asyncio.gather(
            *(self._call(request, path, body) for path in self._sockets.values())
        )
        return [answer for answer in answers if answer is not None]

    @asynccontextmanager
    async def stream(
        self, request: web.Request, sibling: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A sibling's answer to the same call, which may last. Raises aiohttp.ClientError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        async with self._open(request, self._sockets[sibling], b"", timeout) as response:
            yield response

    async def _call(self, request: web.Request, path: Path, body: bytes) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._open(request, path, body, timeout) as response:
                return await response.read()
        except aiohttp.ClientConnectorError:
            return None  # it is being started again, and reads store and configuration anew

    @asynccontextmanager
    async def _open(
        self, request: web.Request, path: Path, body: bytes, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {TOLD: "1", "Content-Type": "application/json"}
        for name in ("Authorization", "x-api-key", "Accept"):
            if name in request.headers:
                headers[name] = request.headers[name]
        url = f"http://sibling{request.path_qs}"
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            http.request(request.method, url, headers=headers, data=body) as response,
        ):
            response.raise_for_status()
            yield response


def told_by_sibling(request: web.Request) -> bool:
    """Only a sibling's socket has no host and port of a peer."""
    return TOLD in request.headers and request.remote in (None, "")
