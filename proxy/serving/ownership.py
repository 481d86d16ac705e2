"""Decides which of several processes on one store serves a session, and forwards calls to it.

A process holds a session while it has unsettled turns in it: turns that are open, or answered but
still on their way to the agent. A process may begin a turn only if its tree has every turn of the
session (an index is unique in the store) and no other living process with an address holds the
session. So all calls of a session in flight are in one process: a retry joins the call that it
repeats, and the session's limits are exact.

    acquired   by recording the intent of a turn            `LiveCall`
    released   when the turn's answer is recorded and marked as arrived or lost (`arrived_answers`);
               when the turn is closed as CUT               `Ownership.close`
               when the process ends                        its lock in the store
               when the process begins to stop              `Store.announce(None)`

Holding a session needs no SQL statement and no clock. A call that reaches another process is
forwarded to the holder. Invariant: nothing is sent to the agent before the holder has answered, so
that the call can be served here if the holder dies first. A probe every `PROBE_EVERY_S` detects a
holder that is alive but does not answer (stopped, or disconnected from the network).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import aiohttp
from aiohttp import web

from proxy.config import ListenConfig
from proxy.errors import HeldElsewhere, ProxyError, StoreError
from proxy.http_request import read_body
from proxy.records import TurnStatus
from proxy.serving.sessions import LiveSession
from proxy.store.protocol import DeliveryMark, Store

_log = logging.getLogger(__name__)

FORWARDED = "X-Agentic-Proxy-Forwarded"
"""Header of a forwarded request, which is not forwarded again."""
CONNECT_TIMEOUT_S = 2.0
CONFIRM_TIMEOUT_S = 3.0
PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Delays between look-ups of the holder of a session while the holder does not answer: it has died,
which the store detects soon, or its port is closed and it is releasing the session."""
CLOSE_DELAYS_S = (0.05, 0.5, 2.0, 5.0)
"""Delays between attempts to close a turn while the store fails; the last one repeats."""
CLOSE_WAIT_S = 1.0
"""How long a call waits until the turns of earlier calls are closed."""
_MISDIRECTED = 421
_UNIX = "unix:"
_OF_THE_CONNECTION = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "expect"}
    | {"content-encoding", "te", "trailer"}
)


class Ownership:
    """Holds sessions for this process, and closes turns whose calls have failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def settle(self, live: LiveSession) -> None:
        """Updates the tree from the store if necessary. Call it while placing.

        Raises:
            HeldElsewhere: another process holds the session.
            StoreError: a turn of an earlier call is still open, because the store fails.
        """
        if live.closing:
            await asyncio.wait(live.closing, timeout=CLOSE_WAIT_S)
            if live.closing:
                raise StoreError("a turn of this session could not be closed yet; try again")
        if live.stale:
            await self.reload(live)
        if live.unsettled - live.unheld:
            await self._hold(live)

    async def reload(self, live: LiveSession) -> None:
        """Reads the tree again, after a write of another process or a failed write of this one."""
        session_id, unread = live.session.session_id, True
        while unread:
            turns = await self._store.get_turns(session_id)
            unread = any(turn.status is TurnStatus.OPEN and live.tree.knows(turn) for turn in turns)
        live.read(turns, await self._store.undelivered(session_id))

    async def _hold(self, live: LiveSession) -> None:
        """Returns when no other process holds the session and the tree has all turns."""
        settled = False
        while not settled:
            known = live.unsettled
            address = await self._store.holder(live.session.session_id)
            if address is not None:
                raise HeldElsewhere(address)
            await self.reload(live)
            settled = live.unsettled <= known
        live.unheld = known

    async def close(self, live: LiveSession, indexes: Iterable[int]) -> None:
        """Closes turns whose call ended without knowing that their answers are recorded, because
        the store or the call failed: see `_close_one`.

        Returns after the first attempt. Further attempts follow until all turns are closed.
        """
        closing = _Closing(live, list(indexes), asyncio.get_running_loop().create_future())
        self._try_to_close(closing)
        await asyncio.wait([closing.tried])

    async def stop(self) -> None:
        """Ends the attempts to close turns. Turns that are still open become CUT when this process
        has ended."""
        self._stopped = True
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _try_to_close(self, closing: _Closing) -> None:
        task = asyncio.create_task(self._close(closing))
        for tasks in (self._closing, closing.live.closing):
            tasks.add(task)
        task.add_done_callback(partial(self._attempted, closing))

    def _attempted(self, closing: _Closing, task: asyncio.Task[None]) -> None:
        """Begins another attempt if this one was ended by an error of any kind."""
        for tasks in (self._closing, closing.live.closing):
            tasks.discard(task)
        if not closing.tried.done():
            closing.tried.set_result(None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("turn %d is still open: %s", closing.left[0], error)
        if closing.left and not self._stopped:
            closing.attempts += 1
            self._try_to_close(closing)

    async def _close(self, closing: _Closing) -> None:
        live = closing.live
        live.stale = True
        if closing.attempts:
            await asyncio.sleep(CLOSE_DELAYS_S[min(closing.attempts, len(CLOSE_DELAYS_S)) - 1])
        while closing.left:
            await self._close_one(live.session.session_id, closing.left[0])
            live.own.discard(closing.left.pop(0))
            live.stale = True

    async def _close_one(self, session_id: str, index: int) -> None:
        """Makes an open turn CUT. An answer that was recorded although its call failed did not
        arrive: no watcher of the call got it."""
        if not await self._store.cut_own_turn(session_id, index):
            await self._store.mark_deliveries([DeliveryMark(session_id, index, arrived=False)])


@dataclass(slots=True)
class _Closing:
    """Turns that are being closed."""

    live: LiveSession
    left: list[int]
    tried: asyncio.Future[None]
    """Done after the first attempt."""
    attempts: int = 0


class Forwarding:
    """Forwards one request, as long as another process holds its session."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
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
        answer = await forward(self._request, held.address)
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
        return _UNIX + own_socket
    if config.peer_url is not None:
        return config.peer_url.rstrip("/")
    host = _OUTWARD[config.host]() if config.host in _OUTWARD else config.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


async def forward(request: web.Request, address: str) -> web.StreamResponse | None:
    """Forwards the request and passes on the holder's answer as it arrives. Returns None if the
    holder has ended, or no longer holds the session.

    Raises:
        ProxyError: 503, the holder is alive and silent. It may be so for hours, so nothing is
            tried again here.
    """
    async with _client(address) as http:
        try:
            async with _while_alive(http, address):
                answer = await _send(http, request, address)
        except aiohttp.ClientConnectionError:
            return None
        except TimeoutError as error:
            raise HeldElsewhere(address).unreachable() from error
        async with answer:
            if answer.status == _MISDIRECTED:
                return None
            return await _pass_on(http, request, address, answer)


async def send_to_holder(request: web.Request, address: str) -> None:
    """Sends the same control call to the holder. A holder that has ended needs no call.

    Raises:
        ProxyError: 503, the holder is alive but did not answer within `CONFIRM_TIMEOUT_S`.
    """
    try:
        async with (
            asyncio.timeout(CONFIRM_TIMEOUT_S),
            _client(address) as http,
            await _send(http, request, address) as answer,
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
    return "http://holder" if address.startswith(_UNIX) else address


def _client(address: str) -> aiohttp.ClientSession:
    unix = address.startswith(_UNIX)
    connector = aiohttp.UnixConnector(address.removeprefix(_UNIX)) if unix else None
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


async def _send(
    http: aiohttp.ClientSession, request: web.Request, address: str
) -> aiohttp.ClientResponse:
    url = _root(address) + request.path_qs
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    headers[FORWARDED] = "1"
    return await http.request(request.method, url, data=await read_body(request), headers=headers)


async def _pass_on(
    http: aiohttp.ClientSession,
    request: web.Request,
    address: str,
    answer: aiohttp.ClientResponse,
) -> web.StreamResponse:
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_THE_CONNECTION}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    try:
        async with _while_alive(http, address):
            async for data in answer.content.iter_any():
                await response.write(data)
    except (aiohttp.ClientError, TimeoutError):  # break the agent's connection too
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response
