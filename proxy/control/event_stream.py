"""Streams a session's events from all processes of this proxy (SSE).

Invariant: a listener gets each event once: first the stored events, then new ones of this process
and of its siblings, whose streams are read in the same way. Those of other proxies on the store are
read from it after each silence of `keep_alive_s`. The stream ends with the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from proxy.control.siblings import Siblings, is_from_sibling
from proxy.errors import StoreError
from proxy.records import SessionStatus
from proxy.serving.sessions import CLOSING, LiveSession
from proxy.store.protocol import Store
from proxy.wire.dialect import KEEP_ALIVE

_log = logging.getLogger(__name__)

QUEUED_EVENTS = 1000
"""Per listener. A listener that falls further behind loses events and must read the record."""

OPEN_S = 2.0
"""Seconds for which the events of a listener wait until the streams of the siblings are open."""


class EventStream:
    """The stream of one listener. Past turns are not among the events; they are in the record."""

    def __init__(
        self, live: LiveSession, store: Store, siblings: Siblings, keep_alive_s: float
    ) -> None:
        self._live = live
        self._store = store
        self._siblings = siblings
        self._keep_alive_s = keep_alive_s
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUED_EVENTS)
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._sent: set[int] = set()
        """Numbers of the events that the listener got."""
        self._open: set[str] = set()
        """The siblings whose streams are open."""

    async def answer(self, request: web.Request, since: int) -> web.StreamResponse:
        """Streams the events after `since`, the number of the last event that the listener got."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        from_sibling = is_from_sibling(request)
        self._live.listeners.add(self._queue)
        try:
            await response.prepare(request)
            if not from_sibling:
                await self._follow(request)
                since = await self._send_stored(response, since)
            while not self._has_ended():
                try:
                    async with asyncio.timeout(self._keep_alive_s):
                        event = await self._queue.get()
                except TimeoutError:
                    await response.write(KEEP_ALIVE)
                    if not from_sibling:
                        await self._follow(request)
                        since = await self._catch_up(response, since)
                    continue
                if event["kind"] != CLOSING:
                    await self._send(response, event)
        finally:
            self._live.listeners.discard(self._queue)
            for relay in self._relays.values():
                relay.cancel()
            await asyncio.gather(*self._relays.values(), return_exceptions=True)
        return response

    async def _catch_up(self, response: web.StreamResponse, since: int) -> int:
        """Sends what another proxy on the store has added, and notices if it ended the session. If
        the store fails, the next time will do."""
        try:
            session = await self._store.get_session(self._live.session.session_id)
            since = await self._send_stored(response, since)
        except StoreError as error:
            _log.info("cannot read the events of other proxies: %s", error.message)
            return since
        if session is None or session.status is not SessionStatus.OPEN:
            self._live.closed.set()
        return since

    async def _send_stored(self, response: web.StreamResponse, since: int) -> int:
        """Returns the number of the last stored event."""
        for event in await self._store.get_events(self._live.session.session_id, since):
            since = event["seq"]
            await self._send(response, event)
        return since

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        seq = event.get("seq")
        if seq is None or seq not in self._sent:
            await response.write(_event(event))
        if seq is not None:
            self._sent.add(seq)

    def _has_ended(self) -> bool:
        return self._live.closed.is_set() and self._queue.empty() and not self._open

    async def _follow(self, request: web.Request) -> None:
        """Opens the streams of all siblings that are reachable. One that does not answer within
        OPEN_S is followed as soon as it does."""
        opened = []
        for name in [] if self._live.closed.is_set() else self._siblings.names:
            relay = self._relays.get(name)
            if relay is None or relay.done():
                opened.append(asyncio.Event())
                self._relays[name] = asyncio.create_task(self._relay(request, name, opened[-1]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                for event in opened:
                    await event.wait()

    async def _relay(self, request: web.Request, sibling: str, opened: asyncio.Event) -> None:
        try:
            async with self._siblings.stream(request, sibling) as response:
                opened.set()
                self._open.add(sibling)
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self._take(orjson.loads(line[6:]))
        except aiohttp.ClientError as error:
            _log.info("cannot read the events of another process of this proxy: %r", error)
        finally:
            opened.set()
            self._open.discard(sibling)
            self._put({"kind": CLOSING})  # wakes the waiting listener

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "expired":  # only one process notices the expiry
            self._live.closed.set()
        self._put(event)

    def _put(self, event: dict[str, Any]) -> None:
        if not self._queue.full():
            self._queue.put_nowait(event)


async def ends_within(live: LiveSession, store: Store, wait_s: float, again_s: float) -> bool:
    """Whether the session ends within `wait_s`. Another proxy on the store may end it, which `live`
    does not know: it is read again every `again_s`."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while not live.closed.is_set():
        session = await store.get_session(live.session.session_id)
        if session is None or session.status is not SessionStatus.OPEN:
            break
        if (left_s := until - loop.time()) <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, again_s)):
                await live.closed.wait()
    return True


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
