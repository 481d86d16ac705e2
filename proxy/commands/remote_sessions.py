"""The sessions of a running proxy, for `agentic-proxy sessions … --url`, where its store is out of
reach: on another machine, or with a person's key, which opens the person's own sessions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.admin_key import configured_key
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.records import Session, Turn
from proxy.search.terms import HitJson
from proxy.store.protocol import SessionFilter


class RemoteSessions:
    """What `sessions` asks of a store, asked of a proxy."""

    def __init__(self, client: ProxyClient) -> None:
        self._client = client

    async def list_sessions(self, where: SessionFilter) -> list[Session]:
        given = {
            "status": where.status,
            "kind": where.kind,
            "id_prefix": where.id_prefix,
            "marked": where.marked,
            "after": where.after,
            "limit": where.limit,
        }
        query = {name: str(value) for name, value in given.items() if value is not None}
        views = await self._client.list_sessions(**query)
        return [(await self._client.get_turns(view["trial_id"]))[0] for view in views]

    async def get_session(self, session_id: str) -> Session | None:
        try:
            return (await self._client.get_turns(session_id))[0]
        except ProxyClientError as error:
            if error.status == 404:
                return None
            raise

    async def get_turns(self, session_id: str) -> list[Turn]:
        return (await self._client.get_turns(session_id))[1]

    async def get_events(self, session_id: str) -> list[dict[str, Any]]:
        return await self._client.past_events(session_id)

    async def search(self, text: str, before: int) -> tuple[list[HitJson], int | None]:
        """The hits of one piece of the record, and where the next one begins."""
        return await self._client.search(text, before)

    async def keep(self, session_id: str, **said: Any) -> None:
        """As `curation.keep`."""
        await self._client.curate(session_id, **said)

    async def remove(self, session_id: str) -> None:
        await self._client.delete(session_id)


@asynccontextmanager
async def remote_sessions(url: str, config: ProxyConfig) -> AsyncIterator[RemoteSessions]:
    """Raises ConfigurationError: the proxy refuses a request, or does not answer."""
    async with ProxyClient(url, configured_key(config, url)) as client:
        try:
            yield RemoteSessions(client)
        except ProxyClientError as error:
            raise ConfigurationError(str(error)) from error
