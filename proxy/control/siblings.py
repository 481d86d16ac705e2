"""What the control plane needs of the other processes of this proxy, if several serve one port.

Changes that are not in the store are sent to them, and what each of them knows is collected. One
process has none (`NoSiblings`); the extra `several_processes` has the others. Invariant: when
`send` returns, every sibling that listens has made the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import aiohttp
from aiohttp import web

FROM_SIBLING = "X-Agentic-Proxy-Sibling"
"""Header of a request from a sibling, which is not forwarded again."""


class Siblings(Protocol):
    """The other processes."""

    @property
    def names(self) -> Sequence[str]: ...

    async def send(self, request: web.Request) -> None:
        """Sends the same control call to every sibling. Raises ProxyError as `ask` does."""
        ...

    async def ask(self, request: web.Request) -> list[bytes]:
        """Sends the same call to all siblings and returns the answers of those that listen.

        A call from a sibling is not sent on; the list is then empty.

        Raises:
            ProxyError: 503, a sibling refused or did not answer in time.
        """
        ...

    def stream(
        self, request: web.Request, sibling: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A sibling's answer to the same call as a stream. Raises aiohttp.ClientError."""
        ...


class NoSiblings:
    """Implements `Siblings` for a proxy of one process."""

    names = ()

    async def send(self, request: web.Request) -> None:
        """Does nothing."""

    async def ask(self, request: web.Request) -> list[bytes]:
        return []

    def stream(
        self, request: web.Request, sibling: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        raise KeyError(sibling)


def is_from_sibling(request: web.Request) -> bool:
    """Whether a sibling sent the request. Only its Unix socket has no peer address."""
    return FROM_SIBLING in request.headers and request.remote in (None, "")
