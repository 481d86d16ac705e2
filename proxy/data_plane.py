"""The agents' side: one HTTP request → authorise → parse → call → write, whole or as a stream.

Invariant: every error leaves in the dialect's own shape, with the status that makes the agent do
the right thing; a stream's terminal event is sent only after its turns are recorded.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
import shortuuid
from aiohttp import web

from proxy.calls import Caller, Calls, check_limits
from proxy.config import ProxyConfig
from proxy.errors import ProxyError, RequestError
from proxy.live_call import LiveCall
from proxy.metrics import Metrics
from proxy.sessions import LiveSession, Sessions
from proxy.wire.dialect import KEEP_ALIVE, Call, Dialect, Headers

_PATH = re.compile(r"(?:/(?P<trial>.+?))?(?:/v1)+/(?P<route>[a-z/_-]+?)/?")
AGENT_HEADERS = (
    "x-claude-code-agent-id",
    "x-openai-subagent",
    "thread-id",
    "x-session-id",
)
"""By which agent families name the sub-agent that calls."""


class DataPlane:
    def __init__(
        self,
        config: ProxyConfig,
        sessions: Sessions,
        calls: Calls,
        dialects: dict[str, Dialect],
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._calls = calls
        self._dialects = dialects
        self._metrics = metrics
        self._in_flight = 0
        limits = config.sessions
        self._session_limits = {
            "max_turns": limits.max_turns,
            "max_tokens": limits.max_tokens,
            "max_concurrent_calls": limits.max_concurrent_calls,
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """`POST …/v1/<route>` of any dialect, the session named by key or by path."""
        trial, route = split_path(request.path)
        dialect = self._dialects.get(route)
        if dialect is None:
            raise web.HTTPNotFound(text=f"no route {request.path}")
        try:
            return await self._serve(request, dialect, trial)
        except ProxyError as error:
            self._metrics.refused(dialect.name, error)
            return error_response(dialect, error)

    async def _serve(
        self, request: web.Request, dialect: Dialect, trial: str | None
    ) -> web.StreamResponse:
        live = await self._sessions.authorise(api_key(request.headers), trial)
        self._admit()
        self._in_flight += 1
        try:
            call = dialect.parse(await read_json(request), request.headers)
            check_limits(live, call, self._session_limits)
            running = await self._calls.open(live, call, _caller(dialect, request.headers))
            return await self._answer(request, dialect, live, call, running)
        finally:
            self._in_flight -= 1

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
        body = dialect.whole(call, shortuuid.uuid(), await running.outcomes())
        response = web.Response(body=body, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, call: Call, running: LiveCall
    ) -> web.StreamResponse:
        """Nothing is sent before the first piece (or the first silence), so that a call that fails
        at once still fails with its status."""
        writer = dialect.writer(call, shortuuid.uuid())
        response = _event_stream()
        async for piece in running.watch(self._config.limits.keep_alive_s):
            begin = b"" if response.prepared else writer.start(running.prompt_tokens)
            if not response.prepared:
                await response.prepare(request)
            await response.write(begin + (KEEP_ALIVE if piece is None else writer.piece(piece)))
        try:
            outcomes = await running.outcomes()
        except ProxyError as error:
            if not response.prepared:
                raise
            await response.write(writer.error(error))
            await response.write_eof()
            return response
        begin = b"" if response.prepared else writer.start(running.prompt_tokens)
        if not response.prepared:
            await response.prepare(request)
        await response.write(begin + writer.end(outcomes))
        await response.write_eof()
        return response

    def _admit(self) -> None:
        if self._in_flight >= self._config.limits.in_flight_calls:
            raise RequestError(
                f"{self._in_flight} calls are being answered, limits.in_flight_calls is "
                f"{self._config.limits.in_flight_calls}; try again later",
                status=429,
                retry_after_s=1.0,
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


async def read_json(request: web.Request) -> dict[str, Any]:
    """Raises RequestError: 413 past `limits.body_bytes`, 400 for what is no JSON object."""
    try:
        data = orjson.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            f"the body is larger than {request.client_max_size} bytes, limits.body_bytes",
            status=413,
        ) from error
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


def _caller(dialect: Dialect, headers: Headers) -> Caller:
    agent_id = next((headers[name] for name in AGENT_HEADERS if name in headers), None)
    retries = headers.get("x-stainless-retry-count", "0")
    return Caller(dialect.name, agent_id, is_retry=retries.isdigit() and int(retries) > 0)
