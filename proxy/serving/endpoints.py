"""The agents' endpoints: authorise → parse → call → write the answer, whole or as a stream.

`AgentEndpoints.handle` is the only place where an error becomes a response; the code below it only
raises. Invariant: every error of the proxy is sent in the dialect's form, counted, logged, and
recorded as an event of its session. A stream's terminal event is sent only after its turns are
recorded. Nothing is sent before the first piece, so that a call that fails before it returns its
HTTP status.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import orjson
from aiohttp import web

from proxy.config import LimitsConfig
from proxy.errors import HeldElsewhere, ProxyError, RequestError
from proxy.http.server import (
    BodiesInFlight,
    HeldBody,
    api_key,
    is_connected,
    read_in_time,
    receive_body,
)
from proxy.machine.logs import CallLog
from proxy.metrics import Metrics
from proxy.serving.asked import Caller
from proxy.serving.call import LiveCall
from proxy.serving.events import EventSender
from proxy.serving.forwarding import Arrivals, Forwarding
from proxy.serving.incoming import IncomingCalls
from proxy.serving.sessions import LiveSession, Sessions
from proxy.wire.body import Body, parse_call
from proxy.wire.dialect import Call, Dialect
from proxy.wire.gemini import GeminiDialect, addressed

_PATH = re.compile(r"(?:/(?P<trial>.+?))?(?:/v1)+/(?P<route>.+?)/?")

COUNT = "/count_tokens"
_CHAT = "chat/completions"
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,3})?")
MAX_AGENT_ID_CHARS = 200
MAX_PATH_CHARS = 200
"""Characters of a wrong path that its error repeats."""
MAX_FIELDS = 20
MAX_FIELD_CHARS = 64
"""Of the unknown fields of a request, and of a name, as they are counted and recorded."""
MAX_EVENT_CHARS = 2_000
"""Characters of a refused call's message that the session's events keep. A message may repeat what
the agent sent, and readers refuse an event that is too long."""


class Exchange(msgspec.Struct):
    """A request, and what is known about it while it is served."""

    request: web.Request
    dialect: Dialect
    trial: str | None
    """The session that the path names."""
    route: str
    """The path after `/v1/`."""
    held: HeldBody
    body: bytes = b""
    arrived_at: float = msgspec.field(default_factory=time.monotonic)
    live: LiveSession | None = None
    """The session, once the request is authorised."""
    call: LiveCall | None = None
    """The call, once it runs in this process."""


class AgentEndpoints:
    """Handles every path under `/v1/` and `/{trial_id}/v1/`."""

    def __init__(
        self,
        sessions: Sessions,
        calls: IncomingCalls,
        dialects: Mapping[str, Dialect],
        metrics: Metrics,
        limits: LimitsConfig,
        *,
        model_name: str,
        refuse_unknown: bool = False,
        on_release: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`dialects` are keyed by route; `model_name` is the name in `/v1/models`;
        `refuse_unknown`: requests with unknown fields are refused; `on_release` gets the size of
        each body whose request is answered."""
        self._sessions = sessions
        self._calls = calls
        self._dialects = dialects
        self._limits = limits
        self._arrivals = Arrivals(limits.unread_s)
        self._model_name = model_name
        self._refuse_unknown = refuse_unknown
        self._metrics = metrics
        self._log = CallLog()
        self._in_flight = 0
        self._bodies = BodiesInFlight(limits.in_flight_body_bytes, on_release)
        metrics.in_flight.set_function(lambda: self._in_flight)
        self._process = os.urandom(8).hex()
        self._answers = itertools.count()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises web.HTTPNotFound for a GET of a response, which is not kept."""
        path = request.path
        gemini = addressed(path, request.query.get("alt", "")) if ":" in path else None
        if gemini is not None and request.method == "POST":
            trial, route, dialect = gemini
            return await self._handled(Exchange(request, dialect, trial, route, self._held()))
        trial, route = split_path(path)
        if request.method == "GET" and route == "responses":
            return _no_websocket(request)
        named = self._dialects.get(route.removesuffix(COUNT))
        if route.partition("/")[0] == "models" and request.method == "GET":
            named = self._dialects["chat/completions"]
        elif named is None or request.method != "POST":
            return self._not_found(request, route)
        return await self._handled(Exchange(request, named, trial, route, self._held()))

    def _held(self) -> HeldBody:
        return HeldBody(self._bodies)

    async def _handled(self, exchange: Exchange) -> web.StreamResponse:
        """The response to a request, also where it is an error."""
        try:
            response = await self._respond(exchange)
        except ProxyError as error:
            error.__traceback__ = None  # its frames refer to the call, and the call to it
            return await self._refuse(exchange, error)
        finally:
            exchange.held.release()
        if self._log.wanted and exchange.call is not None:
            self._log_call(exchange, response.status, stream=exchange.call.asked.request.stream)
        return response

    def confirm(self, number: str) -> web.Response:
        """Another process has passed on the answer that this process gave it."""
        return web.Response(status=204 if self._arrivals.confirm(number) else 404)

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        request, route = exchange.request, exchange.route
        key = api_key(request.headers) or _google_key(request)
        live = await self._sessions.authorise(key, exchange.trial)
        exchange.live = live
        live.users += 1
        try:
            if request.method == "GET":
                return self._models(route.partition("/")[2])
            counts = isinstance(exchange.dialect, GeminiDialect) and exchange.dialect.counts
            if counts or route.endswith(COUNT):
                return await self._count(exchange, live)
            return await self._answer(exchange, live)
        finally:
            live.users -= 1

    async def _answer(self, exchange: Exchange, live: LiveSession) -> web.StreamResponse:
        """The call's answer, from this process or from the one that holds the session."""
        self._admit()
        self._in_flight += 1
        try:
            request, forwarding = await self._parse(exchange, live), None
            caller = _caller(exchange, live)
            while True:
                try:
                    exchange.call = await self._calls.open(live, request, caller)
                    return await self._write(exchange, exchange.call, request)
                except HeldElsewhere as held:
                    exchange.call = None
                    forwarding = forwarding or Forwarding(
                        exchange.request, exchange.body, self._limits.unread_s
                    )
                    response = await forwarding.answer(held)
                if response is not None:
                    return response
                request = await self._parse(exchange, live)  # the call before has completed it
        finally:
            self._in_flight -= 1

    async def _write(self, exchange: Exchange, call: LiveCall, request: Call) -> web.StreamResponse:
        with (
            call.watched(partial(is_connected, exchange.request)) as watcher,
            self._arrivals.expected(exchange.request) as arrival,
        ):
            if request.stream:
                writer = exchange.dialect.writer(request, self._answer_id())
                sender = EventSender(exchange.request, watcher, writer, self._limits)
                response = await sender.send()
            else:
                outcomes = await watcher.outcomes()
                body = exchange.dialect.whole(request, self._answer_id(), outcomes)
                response = web.Response(body=body, content_type="application/json")
                async with read_in_time(exchange.request, self._limits.unread_s, len(body)):
                    await response.prepare(exchange.request)
                    await response.write_eof()
            await arrival.wait()
            watcher.arrived = True
        return response

    async def _parse(self, exchange: Exchange, live: LiveSession) -> Call:
        """Reads the body unless it was read before. Raises RequestError."""
        exchange.body = exchange.body or await receive_body(exchange.request, exchange.held)
        body = Body(exchange.body)
        headers, backends = exchange.request.headers, self._calls.backends
        parse = partial(
            parse_call,
            *(exchange.dialect, body, headers, live.profile, backends),
            images=self._calls.new_images(live),
        )
        call = await asyncio.to_thread(parse) if body.is_large else parse()
        if call.unknown:
            await self._report_unknown(exchange, live, call.unknown)
        return call

    async def _report_unknown(
        self, exchange: Exchange, live: LiveSession, names: tuple[str, ...]
    ) -> None:
        """Counts and records fields that nobody knows. Raises RequestError if they are refused."""
        shown = [name[:MAX_FIELD_CHARS] for name in names[:MAX_FIELDS]]
        for name in shown:
            self._metrics.unknown_field(exchange.dialect.name, name)
        if self._refuse_unknown:
            raise RequestError(
                f"{shown[0]}: no known API has this field; remove it (unknown_fields: refuse)",
                param=shown[0],
            )
        await self._sessions.unknown_fields(live, exchange.route, shown)

    async def _count(self, exchange: Exchange, live: LiveSession) -> web.StreamResponse:
        """Counts the tokens of a prompt; nothing is sampled or recorded."""
        call = await self._parse(exchange, live)
        tokens = await self._calls.count_tokens(live, call)
        if isinstance(exchange.dialect, GeminiDialect):
            return _json(exchange.dialect.counted(tokens))
        return _json({"input_tokens": tokens})

    def _not_found(self, request: web.Request, route: str) -> web.Response:
        """Says what to type instead, in OpenAI's form, which the clients print."""
        asked, path = f"{request.method} {request.path[:MAX_PATH_CHARS]}", request.path.rstrip("/")
        if route.removesuffix(COUNT) in self._dialects:
            message = f"{asked} does not exist; use POST"
        elif end := next(
            (f"/{name}" for name in self._dialects if path.endswith(f"/{name}")), None
        ):
            base = f"{request.host}{path.removesuffix(end)}"[:MAX_PATH_CHARS]
            message = f"{asked} does not exist; set the base URL to {request.scheme}://{base}/v1"
        else:
            known = ", ".join(f"/v1/{name}" for name in self._dialects)
            message = f"{asked} does not exist; calls are POST {known}, and models GET /v1/models"
        error = {"message": message, "type": "not_found_error", "code": "not_found"}
        return _json({"type": "error", "error": error}, status=404)

    def _models(self, wanted: str) -> web.Response:
        """The model list in a form that is valid for OpenAI and Anthropic. Any name is served."""
        name = wanted or self._model_name
        model = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "agentic-proxy",
        }
        if wanted:
            return _json(model)
        return _json({"object": "list", "data": [model], "has_more": False})

    def _answer_id(self) -> str:
        """Unique among all processes: a random prefix and a counter."""
        return f"{self._process}{next(self._answers):08x}"

    def _admit(self) -> None:
        if self._in_flight >= self._limits.in_flight_calls:
            raise RequestError(
                f"{self._in_flight} calls are in flight, and limits.in_flight_calls is "
                f"{self._limits.in_flight_calls}; try again later",
                status=429,
                retry_after_s=1.0,
            )

    async def _refuse(self, exchange: Exchange, error: ProxyError) -> web.Response:
        if self._log.wanted:
            self._log_call(exchange, error.status, **_logged(error))
        self._metrics.refused(exchange.dialect.name, error)
        if exchange.live is not None:
            said = error.message[:MAX_EVENT_CHARS]
            what = {"route": exchange.route, "status": error.status, "message": said}
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


def split_path(path: str) -> tuple[str | None, str]:
    """`/{trial_id}/v1/chat/completions` → (trial_id, "chat/completions"); `/v1/v1` is `/v1`.
    `/v1/chat/completions/{trial_id}` is the same, as in verl's remote agent loop."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None, ""
    trial, route = found["trial"], found["route"]
    if trial is None and route.startswith(_CHAT + "/") and route != _CHAT + COUNT:
        return route.removeprefix(_CHAT + "/"), _CHAT
    return trial, route


def _google_key(request: web.Request) -> str | None:
    """The key as Google's clients send it."""
    return request.headers.get("x-goog-api-key") or request.query.get("key")


def _no_websocket(request: web.Request) -> web.Response:
    """After a 426 Codex switches to HTTP at once; after any other status it retries first."""
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return web.Response(status=426, text="WebSocket is not supported; use POST /v1/responses")
    raise web.HTTPNotFound(text="responses cannot be retrieved; POST /v1/responses creates one")


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def _caller(exchange: Exchange, live: LiveSession) -> Caller:
    headers = exchange.request.headers
    agent_id = next((headers[name] for name in live.profile.agents if name in headers), None)
    retries = headers.get("x-stainless-retry-count", "0")
    timeout_s = headers.get("x-stainless-timeout", "")
    return Caller(
        dialect=exchange.dialect.name,
        arrived_at=exchange.arrived_at,
        agent_id=agent_id and agent_id[:MAX_AGENT_ID_CHARS],
        timeout_s=float(timeout_s) if _SECONDS.fullmatch(timeout_s) else None,
        is_retry=retries.isascii() and retries.isdigit() and int(retries[:9]) > 0,
    )


def _logged(error: ProxyError) -> dict[str, Any]:
    """What is logged of an error. A RequestError quotes the agent, so its message is left out."""
    if isinstance(error, RequestError):
        return {"error": type(error).__name__, "param": error.param, "code": error.code}
    return {"error": type(error).__name__, "reason": error.message}
