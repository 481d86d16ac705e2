"""HTTP requests to one replica; returns bodies and server-sent events.

Invariant: every failure is raised as EngineError (the replica failed, another one may answer) or
EngineRefusal (the request is at fault, no replica will answer), with the replica's URL and message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from typing import Any, TypeVar

import orjson

from proxy.engines.address import EngineAddress
from proxy.engines.connections import Connections, NotConnected, Response, ResponseError
from proxy.errors import ConfigurationError, EngineError, EngineRefusal, UnreachableEngine

T = TypeVar("T")

MAX_ERROR_BYTES = 4096
MAX_EVENT_BYTES = 16 * 2**20
MAX_TEXT_BYTES = 4 * 2**20
"""The metrics of a vLLM with 16 data-parallel ranks have 0.6 MB."""
_REQUEST_FAULTS = (400, 413, 422)
_MISSING = frozenset({404})
NOT_OFFERED = frozenset({401, 403, 404, 405, 501})
"""Statuses with which servers and gateways answer for a path that they do not offer."""


class ServerError(EngineError):
    """The engine answered with the status 500."""


class NotFound(EngineError):
    """The replica answered 404."""


class Upstream:
    """Requests to one replica. Connections are opened on first use, in the running event loop."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """`url` may contain the API key, see `EngineAddress`. `stall_timeout_s`: a call fails if it
        gets no byte for this long; it must be longer than the pauses of weight updates.

        Raises ConfigurationError for an invalid URL or key.
        """
        headers = {
            "Accept": "*/*",
            "User-Agent": "agentic-proxy",
            "Content-Type": "application/json",
        }
        try:
            address = EngineAddress.parse(url, key=api_key)
            self.address = address
            self.url = address.url
            headers |= address.headers
            self._connections = Connections(self.url, headers, connect_timeout_s=connect_timeout_s)
        except ValueError as error:
            raise ConfigurationError(f"engines: {error}") from error
        self.stall_timeout_s = stall_timeout_s

    async def get(self, path: str, *, timeout_s: float, absent: Container[int] = _MISSING) -> Any:
        """The JSON at `path`; None if the body is empty or the status is one of `absent`. Raises
        EngineError."""

        async def read(response: Response) -> bytes:
            return b"" if response.status in absent else await response.read()

        body = await self._request("GET", path, b"", read, timeout_s, absent)
        return self.parse(body) if body else None

    async def text(self, path: str, *, timeout_s: float) -> str:
        """The body at `path`. Raises EngineError, also if the path does not exist or the body has
        more than MAX_TEXT_BYTES."""
        body = bytearray()

        def take(part: bytes) -> None:
            body.extend(part)
            if len(body) > MAX_TEXT_BYTES:
                raise self.fault(f"sent more than {MAX_TEXT_BYTES} bytes at {path}")

        await self._request("GET", path, b"", lambda response: response.pass_to(take), timeout_s)
        return body.decode(errors="replace")

    async def post(self, path: str, body: bytes, *, timeout_s: float | None = None) -> bytes:
        """The response's body. Without `timeout_s`, only `stall_timeout_s` limits the wait."""
        return await self._request("POST", path, body, Response.read, timeout_s)

    async def events(
        self,
        path: str,
        body: bytes,
        take: Callable[[list[bytes]], None],
        *,
        event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        """Passes the `data:` payloads of a stream to `take` as they arrive; those that arrived
        together are in one list. Returns at its end. Raises EngineError, also for an event of more
        than `event_bytes`, and what `take` raises."""
        parts: list[bytes] = []

        def split(part: bytes) -> None:
            nonlocal parts
            parts.append(part)
            whole: list[bytes] = []
            if b"\n" in part:  # joined only here, because a large event has many parts
                *whole, rest = b"".join(parts).replace(b"\r\n", b"\n").split(b"\n\n")
                parts = [rest] if rest else []
            if parts and sum(map(len, parts)) > event_bytes:
                raise self.fault(f"sent an event of more than {event_bytes} bytes")
            payloads = [e[5:].strip() for e in whole if e.startswith(b"data:")]
            if payloads:
                take(payloads)

        await self._request("POST", path, body, lambda response: response.pass_to(split))

    def parse(self, body: bytes) -> Any:
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise self.fault(f"sent a body that is not JSON: {body[:80]!r}") from error

    def fault(self, words: str) -> EngineError:
        """The error for an unusable answer of the engine."""
        return EngineError(f"engine {self.url} {words}", status=502)

    def refusal(self, status: int, words: str) -> EngineError | EngineRefusal:
        """The error for an HTTP status or the `code` of an error event."""
        if status in _REQUEST_FAULTS:
            return EngineRefusal(f"engine {self.url} refused the call: {words}")
        return self._failure(status, words)

    def _failure(self, status: int, words: str) -> EngineError:
        retryable = status in (429, 500, 503)
        kinds: dict[int, type[EngineError]] = {404: NotFound, 500: ServerError}
        return kinds.get(status, EngineError)(
            f"engine {self.url} answered {status}: {words}", status=503 if retryable else 502
        )

    async def close(self) -> None:
        self._connections.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        read: Callable[[Response], Awaitable[T]],
        timeout_s: float | None = None,
        absent: Container[int] = (),
    ) -> T:
        """What `read` returns for the response. `timeout_s` limits the whole request. A status in
        `absent` is not an error."""
        try:
            if timeout_s is None:
                return await self._exchange(method, path, body, read, absent)
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, path, body, read, absent)
        except TimeoutError as error:
            raise EngineError(f"engine {self.url}{path} did not answer in time") from error
        except NotConnected as error:
            raise UnreachableEngine(f"engine {self.url}{path}: {error}") from error
        except (ResponseError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"engine {self.url}{path}: {reason}") from error

    async def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        read: Callable[[Response], Awaitable[T]],
        absent: Container[int],
    ) -> T:
        connections = self._connections
        response = await connections.send(method, path, body, stall_s=self.stall_timeout_s)
        try:
            if response.status >= 400 and response.status not in absent:
                words = _error_message(await response.beginning(MAX_ERROR_BYTES))
                if method == "GET":  # nobody's parameters are at fault
                    raise self._failure(response.status, words)
                raise self.refusal(response.status, words)
            return await read(response)
        finally:
            connections.release(response)


def _error_message(body: bytes) -> str:
    """From `{"error": {"message": …}}`, `{"detail": …}` or plain text."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:MAX_ERROR_BYTES].decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)
