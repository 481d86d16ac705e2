"""Which of several processes on one store serves a session's calls, and how the others reach it.

The lease on a session is its open turns. A process may begin a turn only if its tree has every turn
of the session (an index is unique in the store), and none of them is open at another process that
lives and has an address (`Sessions.hold`). So at any moment one process has all of a session's
calls in flight: a retry joins the call that it repeats, and the session's limits are exact. The
lease costs no statement while it is held and has no clock. It ends when the last of those calls is
recorded, with the process's life (its lock in the store), or when the process is told to stop.

A call that reaches another process is forwarded to the holder. Invariant: nothing is sent to the
agent before the holder has answered, so that where it dies first, the call is served here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial

import aiohttp
from aiohttp import web

from proxy.config import ProxyConfig

_log = logging.getLogger(__name__)

FORWARDED = "X-Agentic-Proxy-Forwarded"
"""On what is forwarded, so that it goes no further."""
CONNECT_TIMEOUT_S = 2.0
TELL_TIMEOUT_S = 10.0
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Between looks at who holds a session whose holder does not answer: it has died, and the store
will know, or its port is closed, and it lets go."""
_MISDIRECTED = 421
_UNIX = "unix:"
_OF_THE_CONNECTION = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "expect"}
    | {"content-encoding", "te", "trailer"}
)


def own_address(config: ProxyConfig, port: int, own_socket: str | None) -> str:
    """Where the other processes reach this one."""
    if own_socket is not None:
        return _UNIX + own_socket
    if config.peer_url is not None:
        return config.peer_url.rstrip("/")
    host = _OUTWARD[config.host]() if config.host in _OUTWARD else config.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _outward(family: socket.AddressFamily, anywhere: str, alone: str) -> str:
    """This machine's address on its way out; nothing is sent. `alone`: where no way leads out."""
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


async def forward(request: web.Request, address: str) -> web.StreamResponse | None:
    """The holder's answer, passed on as it comes; None: it gave none, or is not the holder now."""
    async with _client(address) as http:
        try:
            answer = await _send(http, request, address)
        except (aiohttp.ClientConnectionError, TimeoutError):
            return None
        async with answer:
            return None if answer.status == _MISDIRECTED else await _pass_on(request, answer)


async def tell(request: web.Request, address: str) -> None:
    """The holder is asked the same of the control plane; one that is gone has nothing to end."""
    try:
        async with (
            asyncio.timeout(TELL_TIMEOUT_S),
            _client(address) as http,
            await _send(http, request, address) as answer,
        ):
            answer.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        _log.warning("%s was not told that its session has ended: %r", address, error)


def _client(address: str) -> aiohttp.ClientSession:
    unix = address.startswith(_UNIX)
    connector = aiohttp.UnixConnector(address.removeprefix(_UNIX)) if unix else None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


async def _send(
    http: aiohttp.ClientSession, request: web.Request, address: str
) -> aiohttp.ClientResponse:
    url = ("http://holder" if address.startswith(_UNIX) else address) + request.path_qs
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    headers[FORWARDED] = "1"
    return await http.request(request.method, url, data=await request.read(), headers=headers)


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    try:
        async for data in answer.content.iter_any():
            await response.write(data)
    except aiohttp.ClientError:  # it died in mid-answer: our agent is to see that too
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response
