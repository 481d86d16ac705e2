"""The control plane of quotas: what all sessions that name one may use together.

Invariant: the store counts, in the transactions that begin and record turns, so a quota holds for
all proxies on the store, and survives the sessions that used it.

The bodies of `/quotas`, the control plane of quotas that several sessions share.
"""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web
from pydantic import Field

from proxy.control.schema import MAX_QUOTA_CHARS, parsed
from proxy.errors import RequestError
from proxy.http.openapi import Schema
from proxy.http.server import read_body
from proxy.store.protocol import Store


class NewQuota(Schema):
    """Body of `PUT /quotas/{name}`."""

    max_turns: int | None = Field(None, ge=0, le=2**53)
    """Number of answers; None: no limit."""
    max_tokens: int | None = Field(None, ge=0, le=2**53)
    """Number of sampled tokens; None: no limit."""
    reset: bool = False
    """Whether counting begins again at 0."""


class QuotaView(Schema):
    """A quota, and how much of it is used."""

    name: str
    max_turns: int | None
    max_tokens: int | None
    turns: int
    tokens: int


class Quotas(Schema):
    """Answer of `GET /quotas`."""

    quotas: list[QuotaView]


class SharedQuotas:
    """Example: SharedQuotas(store).handlers["set_quota"] handles `PUT /quotas/{name}`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.handlers = {"set_quota": self._set, "quotas": self._show, "remove_quota": self._remove}

    async def _set(self, request: web.Request) -> web.Response:
        name = _name(request)
        new = parsed(NewQuota, await read_body(request))
        quota = await self._store.set_quota(
            name, max_turns=new.max_turns, max_tokens=new.max_tokens, reset=new.reset
        )
        return web.json_response(asdict(quota))

    async def _show(self, request: web.Request) -> web.Response:
        found = await self._store.get_quotas()
        return web.json_response({"quotas": [asdict(quota) for quota in found]})

    async def _remove(self, request: web.Request) -> web.Response:
        name = _name(request)
        if not await self._store.remove_quota(name):
            raise RequestError(f"there is no quota {name!r}", status=404, param="name")
        return web.json_response({})

    async def check(self, name: str | None) -> None:
        """Raises RequestError: a new session names a quota that does not exist."""
        if name and name not in {quota.name for quota in await self._store.get_quotas()}:
            raise RequestError(
                f"limits.quota: there is no quota {name[:40]!r}; create it by PUT /quotas/NAME",
                param="limits.quota",
            )


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if len(name) > MAX_QUOTA_CHARS or not name.isprintable():
        raise RequestError(
            f"name: {name[:40]!r} has {len(name)} characters; use at most {MAX_QUOTA_CHARS}, none "
            "of them a control character",
            param="name",
        )
    return name
