"""The other processes of this proxy, if several serve one port (`--workers N`).

Sessions are shared through the store, which every process reads. Changes that are not in the store
(pauses, engines, the policy's version, cutting a session's calls in flight) are sent to the other
processes; metrics and events are collected from them. Invariant: when `send` returns, every sibling
that listens has made the change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from proxy.control.siblings import FROM_SIBLING, is_from_sibling
from proxy.errors import ProxyError
from proxy.http.server import read_body

TIMEOUT_S = 10.0


class ProcessSiblings:
    """Implements `proxy.control.siblings.Siblings`. Each of the others listens on a Unix
    socket that only its user can access."""

    def __init__(self, sockets: Sequence[Path] = ()) -> None:
        self._sockets = {str(path): path for path in sockets}

    @property
    def names(self) -> list[str]:
        return list(self._sockets)

    async def send(self, request: web.Request) -> None:
        """Sends the same control call to every sibling. Raises ProxyError as `ask` does."""
        await self.ask(request)

    async def ask(self, request: web.Request) -> list[bytes]:
        """Sends the same call to all siblings and returns the answers of those that listen.

        A call from a sibling is not sent on; the list is then empty.

        Raises:
            ProxyError: 503, a sibling refused or did not answer within `TIMEOUT_S`.
        """
        if is_from_sibling(request):
            return []
        body = await read_body(request)
        answers = await asyncio.gather(
            *(self._call(request, path, body) for path in self._sockets.values())
        )
        return [answer for answer in answers if answer is not None]

    @asynccontextmanager
    async def stream(
        self, request: web.Request, sibling: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A sibling's answer to the same call as a stream. Raises aiohttp.ClientError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S)
        async with self._open(request, self._sockets[sibling], b"", timeout) as response:
            yield response

    async def _call(self, request: web.Request, path: Path, body: bytes) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._open(request, path, body, timeout) as response:
                return await response.read()
        except aiohttp.ClientConnectorError:
            return None  # it is restarting and will read the current state
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProxyError(
                f"another process of this proxy did not make the change within {TIMEOUT_S:g} s; "
                "repeat the request",
                status=503,
                retry_after_s=1.0,
            ) from error

    @asynccontextmanager
    async def _open(
        self, request: web.Request, path: Path, body: bytes, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {FROM_SIBLING: "1", "Content-Type": "application/json"}
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
