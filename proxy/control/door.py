"""The door of the control plane: who may enter, and what every request that entered leaves behind.

Invariant: a handler runs only after its route's `who` was checked, and whether a person may use it;
a change that other processes of the proxy must make, too, is sent to them before the answer; and
every request is audited, also one that was refused, failed, or whose client left.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from proxy.admin_key import AdminKeys
from proxy.config import ListenConfig
from proxy.control import audit
from proxy.control.siblings import Siblings
from proxy.errors import ProxyError
from proxy.http.route import Handler, Route, Who
from proxy.http.server import api_key, forget_body
from proxy.keys import KeyFile
from proxy.person_keys import EVERYTHING, PersonKeys, Scope


class ControlDoor:
    """Example: response = await door.serve(route, handler, request)"""

    def __init__(self, listen: ListenConfig, siblings: Siblings) -> None:
        self._admin_keys = AdminKeys(listen)
        scrape = listen.metrics_key_file
        self._scrape_keys = None if scrape is None else KeyFile(scrape.expanduser())
        self._people = PersonKeys(listen.people)
        self._siblings = siblings

    async def serve(
        self, route: Route, handler: Handler, request: web.Request
    ) -> web.StreamResponse:
        """The answer of `handler`, or a refusal."""
        status = audit.FAILED
        try:
            self._admit(route, request)
            response = await handler(request)
            if route.everywhere:
                await self._siblings.send(request)
            status = response.status
        except ProxyError as error:
            response, status = refused(error), error.status
        except asyncio.CancelledError:
            status = audit.CLIENT_LEFT
            raise
        finally:
            audit.record(request, route.name, status)
            forget_body(request)
        return response

    def _admit(self, route: Route, request: web.Request) -> None:
        """Raises SessionError: the key does not open the route."""
        key, scope = api_key(request.headers) or "", EVERYTHING
        if route.who is not Who.ANYONE and not self._scrapes(route.who, key):
            scope = Scope("" if self._admin_keys.accepts(key) else self._people.person_of(key))
            if not scope.person:
                self._admin_keys.check(key)
        scope.admit(route, request)

    def _scrapes(self, who: Who, key: str) -> bool:
        keys = self._scrape_keys if who is Who.SCRAPER else None
        return keys is not None and keys.accepts(key)


def json_answer(data: dict[str, Any], status: int = 200) -> web.Response:
    """The control plane's form of an answer."""
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        content_type="application/json",
    )


def refused(error: ProxyError) -> web.Response:
    """The control plane's form of a refusal."""
    response = json_answer({"error": {"message": error.message}}, status=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response
