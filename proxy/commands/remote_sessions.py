"""The sessions of a running proxy, for commands with `--url`, where its store is out of reach: on
another machine, or with a person's key, which opens the person's own sessions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from proxy.admin_key import configured_key
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.records import (
    BranchMode,
    Mark,
    Origin,
    RecordedImage,
    Reward,
    RuleAction,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
)
from proxy.search.terms import HitJson
from proxy.store.protocol import SessionFilter


class RemoteSessions:
    """What commands ask of a store, asked of a proxy."""

    def __init__(self, client: ProxyClient) -> None:
        self._client = client
        self._with_image: dict[str, str] = {}
        """Image → a session that has it, of those whose turns were read."""

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
        return [_session(view) for view in await self._client.list_sessions(**query)]

    async def get_session(self, session_id: str) -> Session | None:
        try:
            return (await self._client.get_turns(session_id))[0]
        except ProxyClientError as error:
            if error.status == 404:
                return None
            raise

    async def get_turns(self, session_id: str) -> list[Turn]:
        _, turns = await self._client.get_turns(session_id)
        for image in (image for turn in turns for image in turn.images):
            self._with_image[image.sha256] = session_id
        return turns

    async def get_image(self, sha256: str) -> RecordedImage | None:
        """An image of a session whose turns were read; None: it is of none of them."""
        session_id = self._with_image.get(sha256)
        if session_id is None:
            return None
        return await self._client.recorded_image(session_id, sha256)

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


def _session(view: dict[str, Any]) -> Session:
    """A session as a list of sessions has it."""
    given, branch = dict(view), view["from"]
    marks = [Mark(**each | {"action": RuleAction(each["action"])}) for each in given.pop("marks")]
    return Session(
        given.pop("trial_id"),
        b"",
        SessionKind(given.pop("kind")),
        SessionStatus(given.pop("status")),
        rewards=[Reward(**each) for each in given.pop("rewards")],
        marks=marks,
        origin=None if given.pop("from") is None else _origin(**branch),
        **given,
    )


def _origin(session: str, turn: int, mode: str, **more: Any) -> Origin:
    return Origin(session, turn, BranchMode(mode), **more)
