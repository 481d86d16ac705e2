"""One HTTP exchange with an agent, and the only place where an error becomes a response.

Invariant: every error of the proxy is sent in the dialect's form, counted, logged, and recorded as
an event of its session. Endpoints only raise errors.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from proxy.errors import ProxyError, RequestError
from proxy.logs import CallLog
from proxy.metrics import Metrics
from proxy.serving.call import LiveCall
from proxy.serving.sessions import LiveSession, Sessions
from proxy.wire.dialect import Dialect


@dataclass(slots=True)
class Exchange:
    """A request, and what is known about it while it is served."""

    request: web.Request
    dialect: Dialect
    route: str
    """The path after `/v1/`."""
    arrived_at: float = field(default_factory=time.monotonic)
    live: LiveSession | None = None
    """The session, once the request is authorised."""
    call: LiveCall | None = None
    """The call, once it runs in this process."""


Endpoint = Callable[[Exchange], Awaitable[web.StreamResponse]]


class Exchanges:
    """Runs endpoints, responds to their errors, and logs their calls."""

    def __init__(self, sessions: Sessions, metrics: Metrics) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._log = CallLog()

    async def serve(self, exchange: Exchange, endpoint: Endpoint) -> web.StreamResponse:
        """The endpoint's response, or its error in the dialect's form."""
        try:
            response = await endpoint(exchange)
        except ProxyError as error:
            error.__traceback__ = None  # its frames refer to the call, and the call to it
            return await self._refuse(exchange, error)
        if self._log.wanted and exchange.call is not None:
            self._log_call(exchange, response.status, stream=exchange.call.asked.request.stream)
        return response

    async def _refuse(self, exchange: Exchange, error: ProxyError) -> web.Response:
        if self._log.wanted:
            self._log_call(exchange, error.status, **_logged(error))
        self._metrics.refused(exchange.dialect.name, error)
        if exchange.live is not None:
            what = {"route": exchange.route, "status": error.status, "message": error.message}
            await self._sessions.refused(exchange.live, **what)
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
        return web.Response(
            status=error.status,
            body=exchange.dialect.error(error),
            content_type="application/json",
            headers=headers,
        )

    def _log_call(self, exchange: Exchange, status: int, **more: Any) -> None:
        live, call = exchange.live, exchange.call
        trial_id = None if live is None else live.session.session_id
        fields: dict[str, Any] = {
            "trial_id": trial_id,
            "dialect": exchange.dialect.name,
            "status": status,
        }
        if live is not None and call is not None and call.turns:
            node = live.tree.nodes[call.turns[0]]
            fields["call_id"] = f"{trial_id}#{node.index}"
            fields["turn_status"] = node.status
            fields["prompt_tokens"] = node.prompt_tokens
            fields["sampled_tokens"] = len(node.sampled_ids)
        duration_s = round(time.monotonic() - exchange.arrived_at, 6)
        self._log.write(**fields, duration_s=duration_s, **more)


def _logged(error: ProxyError) -> dict[str, Any]:
    """What is logged of an error. A RequestError quotes the agent, so its message is left out."""
    if isinstance(error, RequestError):
        return {"error": type(error).__name__, "param": error.param, "code": error.code}
    return {"error": type(error).__name__, "reason": error.message}
