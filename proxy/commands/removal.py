"""Removes a session from a store, also one that is open.

An agent that ends without `agentic-proxy run` leaves its session open until it expires. Only the
proxy that serves the store can end it, because it may have the session in memory. Invariant: a
session is removed from the store behind no living proxy's back while a call could reach it.
"""

from __future__ import annotations

import aiohttp

from proxy.admin_key import configured_key
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import ProxyConfig
from proxy.errors import SessionError
from proxy.records import SessionStatus
from proxy.serving.forwarding import UNIX
from proxy.store.curation import removable
from proxy.store.protocol import Store

ANSWER_S = 10.0
"""Seconds in which a proxy deletes a session."""


async def remove(store: Store, config: ProxyConfig, session_id: str) -> None:
    """Removes a session with its record: an open one by one of the proxies that serve the store.

    Raises:
        SessionError: there is no such session (404), one of its calls is being answered or branches
            refer to it (409), or no proxy of the store can be asked (503).
    """
    session = await removable(store, session_id)
    serving = await store.serving() if session.status is SessionStatus.OPEN else []
    if not serving:
        await store.delete_session(session_id)
        return
    refused = [await _ask(each, config, session_id) for each in serving]
    if all(refused):
        raise SessionError(
            f"session {session_id!r} is open, and no proxy of its store could be asked to end it:"
            f" {refused[0]}",
            status=503,
        )


async def _ask(address: str, config: ProxyConfig, session_id: str) -> str:
    """Why the proxy has not deleted the session; empty if it has."""
    key = configured_key(config, address if address.startswith("http") else SocketClient.URL)
    async with _client(address, key) as client:
        try:
            await client.delete(session_id)
        except ProxyClientError as error:
            return str(error) if error.status else f"none answers at {address}"
    return ""


def _client(address: str, key: str | None) -> ProxyClient:
    if address.startswith(UNIX):
        return SocketClient(address.removeprefix(UNIX), key, timeout_s=ANSWER_S)
    return ProxyClient(address, key, timeout_s=ANSWER_S)


class SocketClient(ProxyClient):
    """A client of one of several processes that share a port, by the socket of its own, which its
    user can access."""

    URL = "http://localhost"
    """That of its requests, which names no port."""

    def __init__(self, socket: str, admin_key: str | None, *, timeout_s: float) -> None:
        super().__init__(self.URL, admin_key, timeout_s=timeout_s)
        self._socket = socket

    def _pool(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._socket))
