"""The agents' side: one HTTP request → authorise → parse → call → write, whole or as a stream.

Invariant: every error leaves in the dialect's own shape, with the status that makes the agent do
the right thing; a stream's terminal event is sent only after its turns are recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from typing import Any

import orjson
from aiohttp import web

from proxy.calls import Caller, Calls
from proxy.config import ProxyConfig
from proxy.errors import HeldElsewhere, ProxyError, RequestError
from proxy.live_call import LiveCall
from proxy.logs import CallLog
from proxy.metrics import Metrics
from proxy.processes.forwarding import RETRY_DELAYS_S, forward, was_forwarded
from proxy.recent import Recent
from proxy.rendering.rendering import Rendering
from proxy.sessions import LiveSession, Sessions
from proxy.wire.dialect import KEEP_ALIVE, Call, Dialect, Headers
from proxy.wire.fields import Request

_PATH = re.compile(r"(?:/(?P<trial>.+?))?(?:/v1)+/(?P<route>.+?)/?")


COUNT = "/count_tokens"
MAX_AGENT_ID_CHARS = 200


class DataPlane:
    def __init__(
        self,
        config: ProxyConfig,
        sessions: Sessions,
        calls: Calls,
        rendering: Rendering,
        dialects: dict[str, Dialect],
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._calls = calls
        self._rendering = rendering
        folder = config.model.name if config.model is not None else "model"
        self._model_name = config.served_model_name or folder
        self._dialects = dialects
        self._metrics = metrics
        self._recent = Recent()
        self._log = CallLog()
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)
        self._process = os.urandom(8).hex()
        self._answers = itertools.count()
        limits = config.sessions
        self._session_limits = {
            "max_turns": limits.max_turns,
            "max_tokens": limits.max_tokens,
            "max_concurrent_calls": limits.max_concurrent_calls,
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any path below `/v1/`, the session named by key or by path."""
        trial, route = split_path(request.path)
        if request.method == "GET" and route == "responses":
            return _no_websocket(request)
        dialect = self._dialects.get(route.removesuffix(COUNT))
        if route.partition("/")[0] == "models" and request.method == "GET":
            dialect = self._dialects["chat/completions"]
        elif dialect is None or request.method != "POST":
            raise web.HTTPNotFound(text=f"no route {request.method} {request.path}")
        live: LiveSession | None = None
        begun = time.perf_counter()
        try:
            live = await self._sessions.authorise(api_key(request.headers), trial)
            if request.method == "GET":
                return self._models(route.partition("/")[2])
            if route.endswith(COUNT):
                return await self._count(request, dialect, live)
            return await self._serve(request, dialect, live, begun)
        except ProxyError as error:
            if self._log.wanted:
                self._log_call(dialect, live, begun, error.status, **_logged(error))
            self._metrics.refused(dialect.name, error)
            if live is not None:
                what = {"route": route, "status": error.status, "message": error.message}
                await self._sessions.refused(live, **what)
            return error_response(dialect, error)

    async def _serve(
        self, request: web.Request, dialect: Dialect, live: LiveSession, begun: float
    ) -> web.StreamResponse:
        self._admit()
        self._in_flight += 1
        try:
            call = await self._parse(request, dialect, live)
            _check_limits(live, call, self._session_limits)
            running = await self._open(request, live, call, _caller(dialect, live, request.headers))
            if isinstance(running, web.StreamResponse):
                return running
            response = await self._answer(request, dialect, live, call, running)
            if self._log.wanted:
                self._log_call(dialect, live, begun, response.status, running, stream=call.stream)
            return response
        finally:
            self._in_flight -= 1

    async def _open(
        self, request: web.Request, live: LiveSession, call: Call, caller: Caller
    ) -> LiveCall | web.StreamResponse:
        """The call, running; or its answer, where another process serves the session."""
        delays_s = iter(RETRY_DELAYS_S)
        while True:
            try:
                return await self._calls.open(live, call, caller)
            except HeldElsewhere as held:
                if was_forwarded(request):
                    raise
                answer = await forward(request, held.address)
                if answer is not None:
                    return answer
                delay_s = next(delays_s, None)
                if delay_s is None:
                    raise held.unreachable() from held
            await asyncio.sleep(delay_s)

    def _log_call(
        self,
        dialect: Dialect,
        live: LiveSession | None,
        begun: float,
        status: int,
        running: LiveCall | None = None,
        **more: Any,
    ) -> None:
        trial_id = None if live is None else live.session.session_id
        fields: dict[str, Any] = {"trial_id": trial_id, "dialect": dialect.name, "status": status}
        if live is not None and running is not None:
            node = live.tree.nodes[running.turns[0]]
            fields["call_id"] = f"{trial_id}#{node.index}"
            fields["turn_status"] = node.status
            fields["prompt_tokens"] = node.prompt_tokens
            fields["sampled_tokens"] = len(node.sampled_ids)
        self._log.write(**fields, duration_s=round(time.perf_counter() - begun, 6), **more)

    async def _parse(self, request: web.Request, dialect: Dialect, live: LiveSession) -> Call:
        """Raises RequestError."""
        body = await read_body(request)
        data, session_id = parse_json(body), live.session.session_id
        fields = Request(data, self._recent, session_id, len(body))
        call = dialect.parse(fields, request.headers)
        call.conversation.known = fields.keys
        call.conversation = live.profile.scrubbed(call.conversation)
        return call

    async def _count(
        self, request: web.Request, dialect: Dialect, live: LiveSession
    ) -> web.StreamResponse:
        """The tokens that a prompt would have; nothing is sampled or recorded."""
        call = await self._parse(request, dialect, live)
        ids = await asyncio.to_thread(self._rendering.full, call.conversation)
        prefill = call.conversation.prefill
        begun = 0 if prefill is None else len(self._rendering.prefill(prefill))
        return _json({"input_tokens": len(ids) + begun})

    def _models(self, wanted: str) -> web.Response:
        """In OpenAI's form and Anthropic's at once. Any name is served; one is listed."""
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

    async def _answer(
        self,
        request: web.Request,
        dialect: Dialect,
        live: LiveSession,
        call: Call,
        running: LiveCall,
    ) -> web.StreamResponse:
        arrived = False
        try:
            if call.stream:
                response = await self._stream(request, dialect, call, running)
            else:
                response = await self._whole(request, dialect, call, running)
            arrived = True
            return response
        finally:
            self._calls.settle(live, running, arrived=arrived)

    async def _whole(
        self, request: web.Request, dialect: Dialect, call: Call, running: LiveCall
    ) -> web.StreamResponse:
        body = dialect.whole(call, self._answer_id(), await running.outcomes())
        response = web.Response(body=body, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, call: Call, running: LiveCall
    ) -> web.StreamResponse:
        """Nothing is sent before the first piece (or the first silence), so that a call that fails
        at once still fails with its status."""
        writer = dialect.writer(call, self._answer_id())
        response = _event_stream()

        async def send(data: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
                data = writer.start(running.prompt_tokens, running.turns[0]) + data
            await response.write(data)

        async for piece in running.watch(self._config.limits.keep_alive_s):
            await send(KEEP_ALIVE if piece is None else writer.piece(piece))
        try:
            outcomes = await running.outcomes()
        except ProxyError as error:
            if not response.prepared:
                raise
            await send(writer.error(error))
        else:
            await send(writer.end(outcomes))
        await response.write_eof()
        return response

    def _answer_id(self) -> str:
        """Like no other of this process or another: drawn once, then counted."""
        return f"{self._process}{next(self._answers):08x}"

    def _admit(self) -> None:
        if self._in_flight >= self._config.limits.in_flight_calls:
            raise RequestError(
                f"{self._in_flight} calls are being answered, limits.in_flight_calls is "
                f"{self._config.limits.in_flight_calls}; try again later",
                status=429,
                retry_after_s=1.0,
            )


def _check_limits(live: LiveSession, call: Call, defaults: dict[str, int]) -> None:
    """Raises RequestError when the session may not make this call (now, or at all)."""
    limits = {**defaults, **live.session.limits}
    if live.in_flight >= limits["max_concurrent_calls"]:
        raise RequestError(
            f"{live.in_flight} calls of this session are running, its max_concurrent_calls is "
            f"{limits['max_concurrent_calls']}; wait for one to end",
            status=429,
            code="max_concurrent_calls",
            retry_after_s=1.0,
        )
    turns = len(live.tree) + call.n
    for name, value in (("max_turns", turns), ("max_tokens", live.tree.sampled_tokens)):
        if value > limits[name]:
            raise RequestError(
                f"this session has reached its {name} of {limits[name]}", status=403, code=name
            )


def split_path(path: str) -> tuple[str | None, str]:
    """`/{trial_id}/v1/chat/completions` → (trial_id, "chat/completions"); `/v1/v1` is one."""
    found = _PATH.fullmatch(path)
    return (found["trial"], found["route"]) if found else (None, "")


def api_key(headers: Headers) -> str | None:
    """From `Authorization: Bearer …` or `x-api-key`."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


async def read_body(request: web.Request) -> bytes:
    """Raises RequestError: 413 past `limits.body_bytes`, unread where it says its length."""
    too_large = RequestError(
        f"the body is larger than {request.client_max_size} bytes, limits.body_bytes", status=413
    )
    if (request.content_length or 0) > request.client_max_size:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises RequestError for what is no JSON object."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the body is JSON, but not an object")
    return data


def error_response(dialect: Dialect, error: ProxyError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return web.Response(
        status=error.status,
        body=dialect.error(error),
        content_type="application/json",
        headers=headers,
    )


def _event_stream() -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    return response


def _no_websocket(request: web.Request) -> web.Response:
    """426 makes Codex go on over HTTP at once; anything else costs it several tries."""
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return web.Response(status=426, text="this endpoint speaks HTTP: POST /v1/responses")
    raise web.HTTPNotFound(text="responses are not kept for reading; POST a new one")


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json")


def _logged(error: ProxyError) -> dict[str, Any]:
    """A refusal quotes the agent, so of one only the field is told."""
    if isinstance(error, RequestError):
        return {"error": type(error).__name__, "param": error.param, "code": error.code}
    return {"error": type(error).__name__, "reason": error.message}


def _caller(dialect: Dialect, live: LiveSession, headers: Headers) -> Caller:
    agent_id = next((headers[name] for name in live.profile.agents if name in headers), None)
    retries = headers.get("x-stainless-retry-count", "0")
    is_retry = retries.isascii() and retries.isdigit() and int(retries[:9]) > 0
    return Caller(dialect.name, agent_id and agent_id[:MAX_AGENT_ID_CHARS], is_retry)
