"""Forwards a call to the process that holds its session, and passes on the answer.

    agent ──▶ forwarder ──▶ holder       the request, with a number of the forwarder's choice
    agent ◀── forwarder ◀── holder       the answer, as it arrives
              forwarder ──▶ holder       POST /forwarded/NUMBER, once the agent's connection has it

Invariants: nothing is sent to the agent before the holder has answered, so that the call can be
served here if the holder dies first. The holder counts an answer as arrived only when the forwarder
has confirmed it; a forwarder that is killed in between loses nothing. A probe every `PROBE_EVERY_S`
detects a holder that is alive but does not answer (stopped, or disconnected from the network).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import msgspec
from aiohttp import web

from proxy.config import ListenConfig
from proxy.errors import HeldElsewhere, ProxyError
from proxy.http.server import is_sent, read_body, read_in_time, until_sent
from proxy.machine.port import http_url

_log = logging.getLogger(__name__)

FORWARDED = "X-Agentic-Proxy-Forwarded"
"""Header of a forwarded request, which is not forwarded again. Its value is the number by which the
forwarder confirms the answer."""
CONFIRMED_PATH = "/forwarded/{number}"
CONNECT_TIMEOUT_S = 2.0
CONFIRM_TIMEOUT_S = 3.0
LEFT_S = 0.5
"""How long the end of an answer is awaited when its agent has left: it follows the last event at
once, and what is not at its end must be aborted soon."""
PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Delays between look-ups of the holder of a session while the holder does not answer: it has died,
which the store detects soon, or its port is closed and it is releasing the session."""
_MISDIRECTED = 421
UNIX = "unix:"
"""Begins the address of a process that shares a port with others: its own socket."""
_OF_THE_CONNECTION = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "expect"}
    | {"content-encoding", "te", "trailer"}
)


class Arrival(msgspec.Struct):
    """That the answer to a request has arrived; a context in which it is sent, and can be
    confirmed."""

    request: web.Request
    unread_s: float
    awaited: dict[str, asyncio.Future[None]]
    """By number: the answers that forwarders are to confirm."""
    number: str | None
    """That of a forwarded request; None: the request is the agent's own."""
    confirmed: asyncio.Future[None] | None = None
    """Done when the process that forwarded the request has passed the answer on."""

    def __enter__(self) -> Arrival:
        if self.number is not None:
            self.confirmed = asyncio.get_running_loop().create_future()
            self.awaited[self.number] = self.confirmed
        return self

    def __exit__(self, *_: object) -> None:
        if self.number is not None and self.awaited.get(self.number) is self.confirmed:
            del self.awaited[self.number]

    async def wait(self) -> None:
        """Returns when the whole answer, which was written, has arrived.

        Raises ConnectionError if the agent disconnects, or does not read it in time.
        """
        if self.confirmed is None and is_sent(self.request):
            return
        async with read_in_time(self.request, self.unread_s):
            await until_sent(self.request)
            if self.confirmed is not None:
                await self.confirmed


class Arrivals:
    """Finds out when an answer has arrived at the agent: here, or at the process that passes it
    on."""

    def __init__(self, unread_s: float) -> None:
        """`unread_s`: seconds in which the agent must read what was sent."""
        self._unread_s = unread_s
        self._awaited: dict[str, asyncio.Future[None]] = {}

    def expected(self, request: web.Request) -> Arrival:
        """That of the answer to the request."""
        return Arrival(request, self._unread_s, self._awaited, request.headers.get(FORWARDED))

    def confirm(self, number: str) -> bool:
        """To be called when the forwarder has passed the answer on. False: nobody waits for it."""
        awaited = self._awaited.get(number)
        if awaited is None or awaited.done():
            return False
        awaited.set_result(None)
        return True


class Forwarding:
    """Forwards one request, as long as another process holds its session."""

    def __init__(self, request: web.Request, body: bytes, unread_s: float) -> None:
        """`unread_s`: seconds in which the agent must read what was sent."""
        self._request = request
        self._body = body
        self._unread_s = unread_s
        self._delays_s = iter(RETRY_DELAYS_S)

    async def answer(self, held: HeldElsewhere) -> web.StreamResponse | None:
        """The holder's answer. None, after a delay, if it did not answer: serve the request here.

        Raises:
            HeldElsewhere: the request was forwarded to this process, which does not hold the
                session.
            ProxyError: 503, the holder still does not answer.
        """
        if was_forwarded(self._request):
            raise held
        answer = await forward(self._request, self._body, held.address, self._unread_s)
        if answer is not None:
            return answer
        delay_s = next(self._delays_s, None)
        if delay_s is None:
            raise held.unreachable() from held
        await asyncio.sleep(delay_s)
        return None


def own_address(config: ListenConfig, port: int, own_socket: str | None) -> str:
    """The address at which other processes can reach this one."""
    if own_socket is not None:
        return UNIX + own_socket
    if config.peer_url is not None:
        return config.peer_url.rstrip("/")
    host = _OUTWARD[config.host]() if config.host in _OUTWARD else config.host
    return http_url(host, port)


def _outward(family: socket.AddressFamily, anywhere: str, alone: str) -> str:
    """The address of the interface that routes to `anywhere`, else `alone`. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((anywhere, 9))
        except OSError:
            return alone
        return str(probe.getsockname()[0])


_OUTWARD = {
    "0.0.0.0": partial(_outward, socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": partial(_outward, socket.AF_INET6, "2001:db8::1", "::1"),
}


def was_forwarded(request: web.Request) -> bool:
    return FORWARDED in request.headers


async def forward(
    request: web.Request, body: bytes, address: str, unread_s: float
) -> web.StreamResponse | None:
    """Forwards the request and passes on the holder's answer as it arrives. Returns None if the
    holder has ended, or no longer holds the session.

    Raises:
        ProxyError: 503, the holder is alive and silent. It may be so for hours, so nothing is
            tried again here.
    """
    begun = asyncio.Event()
    passing = asyncio.create_task(_forward(request, body, address, unread_s, begun))
    try:
        return await asyncio.shield(passing)
    except asyncio.CancelledError:  # the agent has left, perhaps because it has the whole answer
        if begun.is_set():
            await asyncio.wait([passing], timeout=LEFT_S)
        passing.cancel()
        await asyncio.wait([passing])
        if not passing.cancelled():
            passing.exception()  # the handler is cancelled, whatever it is
        raise


async def _forward(
    request: web.Request, body: bytes, address: str, unread_s: float, begun: asyncio.Event
) -> web.StreamResponse | None:
    """See `forward`. `begun` is set when the holder's answer begins."""
    number = secrets.token_urlsafe(16)
    async with _client(address, keep_s=2 * unread_s) as http:
        try:
            async with _while_alive(http, address):
                answer = await _send(http, request, body, address, number)
        except aiohttp.ClientConnectionError:
            return None
        except TimeoutError as error:
            raise HeldElsewhere(address).unreachable() from error
        async with answer:
            if answer.status == _MISDIRECTED:
                return None
            begun.set()
            response, whole = await _pass_on(http, request, address, answer, unread_s)
            if whole and answer.status == 200:
                await _confirm(address, number)
            return response


async def send_to_holder(request: web.Request, address: str) -> None:
    """Sends the same control call to the holder. A holder that has ended needs no call.

    Raises:
        ProxyError: 503, the holder is alive but did not answer within `CONFIRM_TIMEOUT_S`.
    """
    try:
        async with (
            asyncio.timeout(CONFIRM_TIMEOUT_S),
            _client(address) as http,
            await _send(http, request, await read_body(request), address, "control") as answer,
        ):
            answer.raise_for_status()
    except aiohttp.ClientConnectionError as error:
        _log.info("%s has ended, so there is no call to cut: %r", address, error)
    except (aiohttp.ClientResponseError, TimeoutError) as error:
        raise ProxyError(
            f"the session has ended, but the proxy at {address} did not confirm within "
            f"{CONFIRM_TIMEOUT_S:g} s that it cut the session's calls; repeat the request",
            status=503,
            retry_after_s=1.0,
        ) from error


@asynccontextmanager
async def _while_alive(http: aiohttp.ClientSession, address: str) -> AsyncIterator[None]:
    """Raises TimeoutError in the block when the holder does not answer a probe."""
    async with asyncio.timeout(None) as limit:
        probing = asyncio.create_task(_probe_until_silent(http, address, limit))
        try:
            yield
        finally:
            probing.cancel()


async def _probe_until_silent(
    http: aiohttp.ClientSession, address: str, limit: asyncio.Timeout
) -> None:
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    while True:
        await asyncio.sleep(PROBE_EVERY_S)
        try:
            async with http.get(_root(address) + "/health", timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError):
            limit.reschedule(asyncio.get_running_loop().time())
            return


def _root(address: str) -> str:
    return "http://holder" if address.startswith(UNIX) else address


def _client(address: str, keep_s: float = 15.0) -> aiohttp.ClientSession:
    """`keep_s`: how long a connection stays open after its answer, if the session does."""
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path, keepalive_timeout=keep_s)
    else:
        connector = aiohttp.TCPConnector(keepalive_timeout=keep_s)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


async def _send(
    http: aiohttp.ClientSession, request: web.Request, body: bytes, address: str, number: str
) -> aiohttp.ClientResponse:
    url = _root(address) + request.path_qs
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    headers[FORWARDED] = number
    return await http.request(request.method, url, data=body, headers=headers)


async def _pass_on(
    http: aiohttp.ClientSession,
    request: web.Request,
    address: str,
    answer: aiohttp.ClientResponse,
    unread_s: float,
) -> tuple[web.StreamResponse, bool]:
    """The response, and whether all of it was sent. Raises ConnectionError if the agent
    disconnects before, or does not read it in time."""
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    sent = False
    try:
        async with _while_alive(http, address):
            async for data in answer.content.iter_any():
                async with read_in_time(request, unread_s, len(data)):
                    await response.write(data)
                sent = is_sent(request)
    except (aiohttp.ClientError, TimeoutError):  # break the agent's connection too
        if request.transport is not None:
            request.transport.abort()
        return response, False
    try:
        async with read_in_time(request, unread_s, 0):
            await response.write_eof()
            await until_sent(request)
    except ConnectionError:
        if not sent:  # an agent may leave when it has the last event
            raise
    return response, True


async def _confirm(address: str, number: str) -> None:
    """On a connection of its own: the holder still serves the call on the other one."""
    url = _root(address) + CONFIRMED_PATH.format(number=number)
    timeout = aiohttp.ClientTimeout(total=CONFIRM_TIMEOUT_S)
    try:
        async with _client(address) as http, http.post(url, json={}, timeout=timeout):
            pass
    except (aiohttp.ClientError, TimeoutError) as error:
        _log.info("%s did not learn that an answer arrived: %r", address, error)
