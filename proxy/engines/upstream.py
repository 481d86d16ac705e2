"""One replica's HTTP connections: requests out, bodies and server-sent events back.

Invariant: whatever goes wrong on the wire leaves as EngineError (the replica's fault: another may
answer) or RequestError (this request's fault: none will), with the replica's URL and its words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from proxy.errors import EngineError, RequestError

MAX_ERROR_BYTES = 4096
MAX_EVENT_BYTES = 16 * 2**20
IDLE_CONNECTION_S = 3.0
"""Below uvicorn's 5 s, so that the engine never closes a connection that we are about to use."""
_REQUEST_FAULTS = (400, 413, 422)


class Upstream:
    """Connections are made on first use, in the running event loop."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 600.0,
    ) -> None:
        """`stall_timeout_s`: no byte for so long, weight updates included, and the call failed."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=stall_timeout_s
        )
        self._http: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The JSON at `path`; None where its body is empty or the path is unknown there."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._request("GET", path, None, timeout) as response:
            body = None if response.status == 404 else await response.read()
        return self.parse(body) if body else None

    async def post(self, path: str, body: bytes, *, timeout_s: float | None = None) -> bytes:
        """The answer's body; without `timeout_s` only `stall_timeout_s` bounds the wait."""
        timeout = aiohttp.ClientTimeout(total=timeout_s) if timeout_s else self._timeout
        async with self._request("POST", path, body, timeout) as response:
            return await response.read()

    async def events(self, path: str, body: bytes) -> AsyncGenerator[list[bytes], None]:
        """The `data:` payloads of a stream, those that came together in one list."""
        async with self._request("POST", path, body, self._timeout) as response:
            rest = b""
            async for read in response.content.iter_any():
                *whole, rest = (rest + read).replace(b"\r\n", b"\n").split(b"\n\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise self.fault(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
                payloads = [e[5:].strip() for e in whole if e.startswith(b"data:")]
                if payloads:
                    yield payloads

    def parse(self, body: bytes) -> Any:
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise self.fault(f"did not answer JSON: {body[:80]!r}") from error

    def fault(self, words: str) -> EngineError:
        """The engine answered, and what it answered cannot be used."""
        return EngineError(f"engine {self.url} {words}", status=502)

    def refusal(self, status: int, words: str) -> EngineError | RequestError:
        """What an HTTP status, or the `code` of an error event, means."""
        if status in _REQUEST_FAULTS:
            return RequestError(f"the engine refuses: {words}")
        retryable = status in (429, 500, 503)
        return EngineError(
            f"engine {self.url} answered {status}: {words}", status=503 if retryable else 502
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers)
        try:
            async with self._http.request(
                method, self.url + path, data=body, timeout=timeout
            ) as response:
                if response.status >= 400 and not (method == "GET" and response.status == 404):
                    raise await self._refusal(response)
                yield response
        except TimeoutError as error:
            raise EngineError(f"engine {self.url}{path} did not answer in time") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"engine {self.url}{path}: {reason}") from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> EngineError | RequestError:
        body = await response.content.read(MAX_ERROR_BYTES)
        return self.refusal(response.status, _error_message(body))


def _error_message(body: bytes) -> str:
    """From `{"error": {"message": …}}`, `{"detail": …}` or plain text."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)
