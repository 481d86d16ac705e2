"""A pool of HTTP/1.1 connections to one replica, with one request at a time on each connection.

Every token of every stream passes through this module, so it avoids the layers of a client library:
llhttp (`httptools`) parses the bytes and passes them to the reader. Invariant: a connection is
reused only after the whole response was read; otherwise it is closed. After an error of its reader,
or after its reader has left, a response passes nothing on.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httptools

from proxy.machine.direct_hosts import proxy_for

IDLE_S = 3.0
"""Less than uvicorn's 5 s, so that the engine does not close a connection just before its reuse."""
MAX_RESPONSE_BYTES = 2**30
MAX_HEAD_BYTES = 65536
"""Of a proxy's answer to CONNECT."""


class ResponseError(Exception):
    """The received bytes are not a complete HTTP response."""


class NotConnected(ResponseError):
    """There was no connection, so nothing was sent."""


class Response(asyncio.Protocol):
    """One connection, and the response that is read from it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._take: Callable[[bytes], None] | None = None
        self._failure: Exception | None = None
        self._stall_s = self._heard_at = 0.0
        self._bytes = 0
        self._has_length = False
        self.status = 0
        self.ended = True
        self.free_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self.ended and self._failure is None and self._transport is not None

    async def send(self, head: bytes, body: bytes, stall_s: float) -> None:
        """Sends a request and returns when the status is known. Until the end of the response,
        `stall_s` seconds without a byte raise a TimeoutError. Like every method that reads, it
        raises ResponseError and OSError."""
        assert self._transport is not None
        self.status, self.ended, self._has_length, self._bytes = 0, False, False, 0
        self._parts = []
        self._parser = httptools.HttpResponseParser(self)
        self._stall_s, self._heard_at = stall_s, self._loop.time()
        self._timer = self._loop.call_later(stall_s, self._look)
        self._transport.writelines([head, body] if body else [head])
        while not self.status:
            await self._news()

    async def read(self) -> bytes:
        """The rest of the body."""
        while not self.ended:
            await self._news()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return body

    async def beginning(self, size: int) -> bytes:
        """At least the first `size` bytes of the body, or the whole body if it is shorter."""
        while not self.ended and self._bytes < size:
            await self._news()
        return b"".join(self._parts)

    async def pass_to(self, take: Callable[[bytes], None]) -> None:
        """Passes the rest of the body to `take` while it arrives, without waking the caller's task.
        Returns at its end. Also raises what `take` raises."""
        self._take = take
        try:
            self._pass_on()
            while not self.ended:
                await self._news()
        finally:
            self._take = None

    def close(self) -> None:
        self._rest()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is one, but not by its type

    def data_received(self, data: bytes) -> None:
        if self.ended:  # no request is waiting for it
            self.close()
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ResponseError(f"did not answer in HTTP: {error}"))
        if self._take is not None:
            self._pass_on()
        if self._take is None or self.ended:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.ended:
            return
        if self.status and not self._has_length and exc is None:
            self.on_message_complete()  # the body ends with the connection
            self._wake()
        else:
            self._fail(exc or ResponseError("closed the connection in the middle of an answer"))

    def on_message_begin(self) -> None:
        if self.ended:
            raise ResponseError("sent two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.status = status if status >= 200 else 0

    def on_body(self, body: bytes) -> None:
        self._bytes += len(body)
        if self._bytes > MAX_RESPONSE_BYTES:
            self._fail(ResponseError(f"sent more than {MAX_RESPONSE_BYTES} bytes"))
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status:  # a final response, not an informational one (1xx)
            self.ended = True
            if not self._parser.should_keep_alive() and self._transport is not None:
                self._transport.close()
                self._transport = None
            self._rest()

    async def _news(self) -> None:
        """Waits until bytes have arrived or the response has failed. Raises the error of a response
        that has failed before; the caller first takes the bytes that arrived."""
        if self._failure is not None:
            raise self._failure
        self._reader = self._loop.create_future()
        await self._reader

    def _pass_on(self) -> None:
        if self._take is None or not self._parts:
            return
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        try:
            self._take(part)
        except Exception as error:  # noqa: BLE001 - raised again in the reader's task
            self.ended = False  # even if these were the last bytes
            self._take = None
            self._failure = None  # of later bytes; the taker's error comes before it
            self._fail(error)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _look(self) -> None:
        """Fails the response if no byte has arrived within `stall_s`."""
        left = self._heard_at + self._stall_s - self._loop.time()
        if left <= 0:
            self._fail(TimeoutError())
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self.close()
        self._wake()

    def _rest(self) -> None:
        self._parser = None  # breaks a reference cycle
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Opening(asyncio.Protocol):
    """A connection to an HTTP proxy, until its answer to CONNECT."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status: asyncio.Future[bytes] = loop.create_future()
        """The answer's first line; empty if the connection was closed before its end."""
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head or len(self._head) > MAX_HEAD_BYTES:
            self._set(self._head.partition(b"\r\n")[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._set(b"")

    def _set(self, status: bytes) -> None:
        if not self.status.done():
            self.status.set_result(status)


class Connections:
    """The connections to one replica, opened on first use in the running event loop."""

    def __init__(self, url: str, headers: dict[str, str], *, connect_timeout_s: float) -> None:
        """Raises ValueError for an invalid URL or header."""
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self._host, https = self._url.hostname, self._url.scheme == "https"
        self._port = self._url.port or (443 if https else 80)
        self._tls = ssl.create_default_context() if https else None
        self._proxy = proxy_for(url)
        host = self._url.netloc.rpartition("@")[2]
        lines = [f"{name}: {value}" for name, value in {"Host": host, **headers}.items()]
        if any(not line.isprintable() for line in lines):
            raise ValueError("a header contains a line break or a control character")
        self._headers = "\r\n".join(lines).encode()
        self._connect_timeout_s = connect_timeout_s
        self._free: list[Response] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def send(self, method: str, path: str, body: bytes, *, stall_s: float) -> Response:
        """Sends a request and returns the response when its status is known. `release` it later.

        Raises NotConnected before anything is sent; then ResponseError or OSError, also while the
        response is read. It is a TimeoutError (an OSError) if no byte arrives for `stall_s`.
        """
        response = self._kept()
        if response is None:
            try:
                response = await self._connect()
            except TimeoutError as error:
                raise NotConnected("did not accept a connection in time") from error
            except (ResponseError, OSError) as error:
                raise NotConnected(str(error) or type(error).__name__) from error
        head = b"%b %b HTTP/1.1\r\n%b\r\nContent-Length: %d\r\n\r\n" % (
            method.encode(),
            (self._url.path + path).encode(),
            self._headers,
            len(body),
        )
        try:
            await response.send(head, body, stall_s)
        except BaseException:
            response.close()
            raise
        return response

    def release(self, response: Response) -> None:
        """Keeps the connection if the response was read to its end."""
        if not response.usable:
            response.close()
            return
        loop = asyncio.get_running_loop()
        response.free_since = loop.time()
        self._free.append(response)
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        while self._free:
            self._free.pop().close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _kept(self) -> Response | None:
        since = asyncio.get_running_loop().time() - IDLE_S
        while self._free:
            response = self._free.pop()
            if response.usable and response.free_since > since:
                return response
            response.close()
        return None

    async def _connect(self) -> Response:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            if self._proxy is not None:
                return await self._connect_through(self._proxy)
            _, response = await loop.create_connection(
                lambda: Response(loop), self._host, self._port, ssl=self._tls
            )
        return response

    async def _connect_through(self, proxy: str) -> Response:
        """Connects by TLS through a tunnel of an HTTP proxy."""
        assert self._tls is not None  # nothing else goes through a proxy
        loop, parts = asyncio.get_running_loop(), urlsplit(proxy)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        shown, target = f"the proxy {parts.hostname}:{port}", f"{self._host}:{self._port}"
        try:
            transport, opening = await loop.create_connection(
                lambda: _Opening(loop), parts.hostname or "", port, ssl=tls
            )
        except OSError as error:
            raise ResponseError(f"{shown} of HTTPS_PROXY or ALL_PROXY: {error}") from error
        try:
            lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
            if parts.username is not None:
                key = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
                lines.append(f"Proxy-Authorization: Basic {b64encode(key).decode()}")
            transport.write("\r\n".join([*lines, "", ""]).encode())
            status = await opening.status
            if status.split(b" ", 2)[1:2] != [b"200"]:
                words = status.decode(errors="replace")
                raise ResponseError(f"{shown} refused {target}: {words}")
            response = Response(loop)
            inner = await loop.start_tls(transport, response, self._tls, server_hostname=self._host)
            assert inner is not None
        except BaseException:
            transport.abort()
            raise
        response.connection_made(inner)
        return response

    def _sweep(self) -> None:
        """Closes connections that were idle for IDLE_S. The longest idle ones come first."""
        loop = asyncio.get_running_loop()
        since = loop.time() - IDLE_S
        while self._free and self._free[0].free_since <= since:
            self._free.pop(0).close()
        self._sweeper = loop.call_later(IDLE_S, self._sweep) if self._free else None
