"""The extra `quotas`: what all sessions that name one may use together.

Invariant: the store counts, in the transactions that begin and record turns, so a quota holds for
all proxies on the store, and survives the sessions that used it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web
from pydantic import Field

from proxy.control.schema import MAX_QUOTA_CHARS, parsed
from proxy.errors import RequestError
from proxy.extra import Core, Extra
from proxy.http.openapi import Nothing, Schema
from proxy.http.route import route, routes_of
from proxy.http.server import read_body


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


class SharedQuotas(Extra):
    """Answers the control plane's requests for quotas."""

    async def open(self, core: Core) -> None:
        self.core = core
        self._store = core.store

    @route(
        "PUT",
        "/quotas/{name}",
        name="set_quota",
        summary="Sets what all sessions whose limits name this quota may use together",
        answer=QuotaView,
        takes=NewQuota,
        refusals=(400,),
    )
    async def _set(self, request: web.Request) -> web.Response:
        name = _name(request)
        new = parsed(NewQuota, await read_body(request))
        quota = await self._store.set_quota(
            name, max_turns=new.max_turns, max_tokens=new.max_tokens, reset=new.reset
        )
        return web.json_response(asdict(quota))

    @route(
        "GET",
        "/quotas",
        name="quotas",
        summary="Lists the quotas, and how much of each is used",
        answer=Quotas,
    )
    async def _show(self, request: web.Request) -> web.Response:
        found = await self._store.get_quotas()
        return web.json_response({"quotas": [asdict(quota) for quota in found]})

    @route(
        "DELETE",
        "/quotas/{name}",
        name="remove_quota",
        summary="Removes a quota; sessions that name it can make no more calls",
        answer=Nothing,
        refusals=(400, 404),
    )
    async def _remove(self, request: web.Request) -> web.Response:
        name = _name(request)
        if not await self._store.remove_quota(name):
            raise RequestError(f"there is no quota {name!r}", status=404, param="name")
        return web.json_response({})

    async def on_create(self, limits: Mapping[str, Any]) -> None:
        """Raises RequestError: a new session names a quota that does not exist."""
        name = limits.get("quota")
        if name and name not in {quota.name for quota in await self._store.get_quotas()}:
            raise RequestError(
                f"limits.quota: there is no quota {name[:40]!r}; create it by PUT /quotas/NAME",
                param="limits.quota",
            )


SharedQuotas.routes = routes_of(SharedQuotas)


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if len(name) > MAX_QUOTA_CHARS or not name.isprintable():
        raise RequestError(
            f"name: {name[:40]!r} has {len(name)} characters; use at most {MAX_QUOTA_CHARS}, none "
            "of them a control character",
            param="name",
        )
    return name
