"""The other processes of this proxy, where several serve one port (`--workers N`).

Sessions need nothing of this: the store is the truth, and each process reads it. What is no record
(pauses, engines, the policy's version, calls in flight of a session that was ended) is told to the
others. Invariant: when `tell` returns, every sibling that listens has done it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

TOLD = "X-Agentic-Proxy-Told"
"""On what a sibling tells, so that it goes no further."""
TIMEOUT_S = 10.0


class Siblings:
    """Each process listens on a Unix socket in a folder that only its user may enter."""

    def __init__(self, sockets: Sequence[Path] = ()) -> None:
        self._sockets = sockets

    async def tell(self, request: web.Request) -> None:
        """Makes the same control call at every sibling.

        Raises:
            aiohttp.ClientResponseError: one of them refused.
        """
        if told_by_sibling(request):
            return
        body = await request.read()
        headers = {TOLD: "1", "Content-Type": "application/json"}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        await asyncio.gather(
            *(_tell(path, request.method, request.path_qs, headers, body) for path in self._sockets)
        )


def told_by_sibling(request: web.Request) -> bool:
    """Only a sibling's socket has no host and port of a peer."""
    return TOLD in request.headers and request.remote in (None, "")


async def _tell(path: Path, method: str, url: str, headers: dict[str, str], body: bytes) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        try:
            async with http.request(
                method, f"http://sibling{url}", headers=headers, data=body
            ) as response:
                response.raise_for_status()
        except aiohttp.ClientConnectorError:
            return  # it is being started again, and reads the store and its configuration anew
