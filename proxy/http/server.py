"""The common part of all HTTP servers: the runner, and reading a request's key and body.

Invariant: never reads or decompresses more than `client_max_size` (`limits.body_bytes`) of a body.
A request that is broken on the wire (framing, encoding, a client that disconnects) is the client's
error: it gets a 4xx if a response is possible, and never causes a traceback in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from io import BytesIO
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import PayloadAccessError, RequestPayloadError

from proxy.errors import RequestError

BODY_TIMEOUT_S = 120.0
"""Seconds in which a request body must arrive: 16 MiB at 1.1 Mbit/s."""
LARGE_BODY_BYTES = 2**20
"""From this size on, aiohttp's client sends a body in pieces, not to block the loop."""
IDLE_S = 120
"""Seconds after which a connection without a complete request is closed: longer than the HTTP
clients of agents and load balancers keep an idle connection."""

HEAD_BYTES = 8192
"""Room for the head of a response in the connection's buffer."""

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_RAW_DEFLATE_BITS = -15
_WIRE_ERRORS = (HttpProcessingError, RequestPayloadError, PayloadAccessError, ConnectionError)
_UNPACKED = web.RequestKey("unpacked", bytes)


class BodiesInFlight:
    """Counts the bytes of all request bodies in memory, so that they are at most `limit_bytes`."""

    def __init__(
        self, limit_bytes: int, on_release: Callable[[int], None] = lambda size: None
    ) -> None:
        """`on_release` gets the size of each body that is released."""
        self._limit_bytes = limit_bytes
        self._on_release = on_release
        self._bytes = 0

    def add(self, size: int) -> None:
        """Raises RequestError (429) beyond the limit."""
        if self._bytes + size > self._limit_bytes:
            raise RequestError(
                f"the bodies of the requests in flight have {self._bytes} bytes, and with this one "
                f"they would exceed limits.in_flight_body_bytes of {self._limit_bytes}; try again "
                "later",
                status=429,
                retry_after_s=1.0,
            )
        self._bytes += size

    def release(self, size: int) -> None:
        self._bytes -= size
        self._on_release(size)


class HeldBody:
    """What `BodiesInFlight` counts of one request: its body while it arrives, and until
    `release`."""

    __slots__ = ("_bodies", "_bytes")

    def __init__(self, bodies: BodiesInFlight) -> None:
        self._bodies = bodies
        self._bytes = 0

    def add(self, size: int) -> None:
        """Counts `size` more bytes. Raises RequestError (429) beyond the limit."""
        self._bodies.add(size)
        self._bytes += size

    def release(self) -> None:
        """Subtracts what was counted."""
        self._bodies.release(self._bytes)


def app_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """A runner that leaves decompression to `read_body`, does not log clients' errors, and closes
    idle connections after IDLE_S.

    `options` are those of `web.AppRunner`.
    """
    log = logging.getLogger("aiohttp.server.requests")
    log.addFilter(_is_our_error)
    return web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=IDLE_S,
        logger=log,
        **options,
    )


def api_key(headers: Mapping[str, str]) -> str | None:
    """The key in `Authorization: Bearer …` or in `x-api-key`; None if there is none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


async def read_body(request: web.Request) -> bytes:
    """The body, which may be read several times; see `receive_body`."""
    if _UNPACKED not in request:
        request[_UNPACKED] = await receive_body(request)
    return request[_UNPACKED]


async def receive_body(request: web.Request, held: HeldBody | None = None) -> bytes:
    """The body, decompressed if its `Content-Encoding` is gzip or deflate; to be called once. Its
    bytes are counted in `held`, as they arrive and once more when they are decompressed.

    Raises RequestError: 429 if the limit of `held` is reached; 408 if the body does not arrive
    within BODY_TIMEOUT_S; 413 if it is larger than `client_max_size`, compressed or not; 415 for
    another encoding; 400 for a body that does not match its encoding. A body whose declared length
    is too large is not read at all.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding not in ("identity", "", *_WINDOW_BITS):
        raise RequestError(
            f"Content-Encoding {encoding[:40]!r} is not supported; send the body as gzip, deflate "
            "or uncompressed",
            status=415,
        )
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request.client_max_size)
    if request.content.is_eof():  # all of it has arrived, so nothing waits
        body = _read_at_once(request, held)
    else:
        body = await _read_in_body_timeout(request, held)
    if body and encoding in _WINDOW_BITS:
        # zlib releases the GIL, so that decompressing a large body delays no other request.
        body = await asyncio.to_thread(_unpack, body, encoding, request.client_max_size)
        if held is not None:
            held.add(len(body))
    return body


async def answer_expect(request: web.Request) -> None:
    """Handles `Expect`. aiohttp's own handler quotes the header, which fails if it is not UTF-8."""
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is supported")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0


def read_in_time(
    request: web.Request, limit_s: float, sent_bytes: int | None = None
) -> AbstractAsyncContextManager[None]:
    """Breaks the connection if the client does not read what the block sends within `limit_s`.

    Raises ConnectionResetError then, as for a client that disconnects. There is no timer if the
    block sends `sent_bytes`, and the connection's buffer has room for them: it does not wait then.
    """
    transport = request.transport
    if sent_bytes is None or transport is None or request.protocol.writing_paused:
        return _read_in_time(request, limit_s)
    buffered = transport.get_write_buffer_size() + sent_bytes + HEAD_BYTES
    if buffered <= transport.get_write_buffer_limits()[1]:
        return nullcontext()
    return _read_in_time(request, limit_s)


def is_connected(request: web.Request) -> bool:
    """Whether the client's end of the connection is open. The kernel knows it before the event loop
    has reported it to the handler."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return False
    state = select.poll()
    state.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return not state.poll(0)


def is_sent(request: web.Request) -> bool:
    """Whether the connection is open, and the kernel has all of the response that was written."""
    transport = request.transport
    return transport is not None and not transport.get_write_buffer_size()


async def until_sent(request: web.Request) -> None:
    """Returns when the kernel has all of the response that was written, so that it reaches the
    client even if this process is killed.

    Raises ConnectionError if the connection is broken.
    """
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size():
        low, high = transport.get_write_buffer_limits()
        transport.set_write_buffer_limits(0)
        try:
            await request.writer.drain()
        finally:
            transport.set_write_buffer_limits(high, low)
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")


@asynccontextmanager
async def _read_in_time(request: web.Request, limit_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client read nothing for {limit_s:g} s") from error


def forget_body(request: web.Request) -> None:
    """Frees what `read_body` keeps, once the request is answered. aiohttp keeps a request until its
    connection brings the next one, so that an idle connection would hold the memory of its last
    body."""
    request.pop(_UNPACKED, None)


async def _read_in_body_timeout(request: web.Request, held: HeldBody | None) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, held)
    except TimeoutError as error:
        raise RequestError(
            f"the request body did not arrive within {BODY_TIMEOUT_S:g} s; send it again",
            status=408,
        ) from error


def _read_at_once(request: web.Request, held: HeldBody | None) -> bytes:
    try:
        body = request.content.read_nowait()
    except RequestPayloadError as error:
        raise _broken_chunks() from error
    if len(body) > request.client_max_size:
        raise _too_large(request.client_max_size)
    if held is not None:
        held.add(len(body))
    return body


async def _read(request: web.Request, held: HeldBody | None) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while part := await request.content.readany():
            parts.append(part)
            size += len(part)
            if size > request.client_max_size:
                raise _too_large(request.client_max_size)
            if held is not None:
                held.add(len(part))
    except RequestPayloadError as error:
        raise _broken_chunks() from error
    return b"".join(parts)


def _broken_chunks() -> RequestError:
    return RequestError("the body's chunked encoding is invalid; send it again")


def _unpack(packed: bytes, encoding: str, limit: int) -> bytes:
    bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and packed[0] & 0xF != 8:  # without the header of RFC 1950
        bits = _RAW_DEFLATE_BITS
    unpacker = zlib.decompressobj(bits)
    try:
        body = unpacker.decompress(packed, limit + 1)
    except zlib.error as error:
        raise RequestError(
            f"the body is not {encoding}, as its Content-Encoding declares"
        ) from error
    if len(body) > limit:
        raise _too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        wrong = "is cut off" if not unpacker.eof else "has data after its end"
        raise RequestError(f"the {encoding} body {wrong}; send one complete {encoding} stream")
    return body


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the request body is larger than {limit} bytes (limits.body_bytes)", status=413
    )


def _is_our_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], _WIRE_ERRORS))


def bounded_number(text: str, name: str, low: float, high: float) -> float:
    """A number in a query. Raises RequestError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise RequestError(f"{name}: {text!r} is not a number from {low} to {high}")
    return value


def sent_body(body: bytes) -> bytes | BytesIO:
    """A request's body for aiohttp's client, which warns of a large one that is given as bytes."""
    return body if len(body) < LARGE_BODY_BYTES else BytesIO(body)
