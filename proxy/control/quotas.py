"""The control plane of quotas: what all sessions that name one may use together.

Invariant: the store counts, in the transactions that begin and record turns, so a quota holds for
all proxies on the store, and survives the sessions that used it.
"""

from __future__ import annotations

from dataclasses import asdict
from urllib.parse import unquote

from aiohttp import web

from proxy.control.quotas_schema import NewQuota
from proxy.control.schema import MAX_QUOTA_CHARS, parsed
from proxy.errors import RequestError
from proxy.http_request import read_body
from proxy.store.protocol import Store


class SharedQuotas:
    """Example: SharedQuotas(store).set is the handler of `PUT /quotas/{name}`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def set(self, request: web.Request) -> web.Response:
        name = unquote(request.match_info["name"])
        if len(name) > MAX_QUOTA_CHARS:
            raise RequestError(
                f"name: {len(name)} characters, at most {MAX_QUOTA_CHARS} are allowed", param="name"
            )
        new = parsed(NewQuota, await read_body(request))
        quota = await self._store.set_quota(
            name, max_turns=new.max_turns, max_tokens=new.max_tokens, reset=new.reset
        )
        return web.json_response(asdict(quota))

    async def show(self, request: web.Request) -> web.Response:
        found = await self._store.get_quotas()
        return web.json_response({"quotas": [asdict(quota) for quota in found]})

    async def check(self, name: str | None) -> None:
        """Raises RequestError: a new session names a quota that does not exist."""
        if name and name not in {quota.name for quota in await self._store.get_quotas()}:
            raise RequestError(
                f"limits.quota: there is no quota {name[:40]!r}; create it by PUT /quotas/NAME",
                param="limits.quota",
            )
