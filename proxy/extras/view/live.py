"""Streams what happens in a store to the page, as server-sent events.

Each event's id is the position in the store up to which the reader has everything, so that a reader
that reconnects with it (`Last-Event-ID`, or `?after=` in the address) misses nothing and gets
nothing twice. The store is asked for what is new once per `POLL_S` and reader: one way for one
process, several processes, several machines, and a store that nobody writes to any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from aiohttp import web

from proxy.errors import RequestError
from proxy.extras.view.answers import StateJson
from proxy.extras.view.run_answers import EndOfRun
from proxy.extras.view.summaries import recent_json
from proxy.http.valid_json import write_json
from proxy.person_keys import Scope
from proxy.store.browser import Browser, Position, Recent

POLL_S = 1.0
KEEP_ALIVE_POLLS = 15
"""Polls after which a stream sends a comment and checks that its reader still may."""
MAX_READERS = 100
BATCH = 500
"""Turns in one event; a reader that is further behind gets several events."""


class LiveFeed:
    """The streams of all readers of this process."""

    def __init__(
        self,
        browser: Callable[[], Browser],
        state: Callable[[Scope], StateJson],
        ends: Callable[[], Mapping[str, EndOfRun]] = dict,
    ) -> None:
        """`state` returns what is sent besides the record, such as the engines, to a reader of
        these sessions. `ends`: the runs as they are when the streams end, because their readers
        cannot ask any more."""
        self._browser = browser
        self._state = state
        self._ends = ends
        self._closing = asyncio.Event()
        self._readers = 0

    def close(self) -> None:
        """Ends all streams."""
        self._closing.set()

    async def stream(
        self, request: web.Request, scope: Scope, may_read: Callable[[], Awaitable[bool]]
    ) -> web.StreamResponse:
        """`scope`: the sessions that are sent. Raises RequestError (429) if there are too many
        readers."""
        if self._readers >= MAX_READERS:
            raise RequestError(
                f"{self._readers} pages follow this proxy, at most {MAX_READERS} may; close some",
                status=429,
                retry_after_s=10.0,
            )
        self._readers += 1
        try:
            return await self._stream(request, scope, may_read)
        finally:
            self._readers -= 1

    async def _stream(
        self, request: web.Request, scope: Scope, may_read: Callable[[], Awaitable[bool]]
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        position = Position.parse(after)
        state, polls = b"", 0
        await response.prepare(request)
        while not self._closing.is_set():
            recent = await self._browser().recent(position, BATCH)
            news = position is None or recent.position != position
            position = recent.position
            if news:
                event = write_json(recent_json(_own(recent, scope)))
                await response.write(f"id: {position}\ndata: ".encode() + event + b"\n\n")
            now = write_json(self._state(scope))
            if now != state:
                state = now
                await response.write(b"event: state\ndata: %b\n\n" % state)
            polls += 1
            if polls >= KEEP_ALIVE_POLLS:
                polls = 0
                if not await may_read():
                    break
                await response.write(b": still here\n\n")
            full = max(len(recent.begun), len(recent.answered), len(recent.events)) >= BATCH
            if not full:
                await self._pause()
        if self._closing.is_set():
            await self._end(response, scope, position)
        return response

    async def _end(
        self, response: web.StreamResponse, scope: Scope, position: Position | None
    ) -> None:
        """The last events: what was recorded since, and how each run has ended."""
        recent = await self._browser().recent(position, BATCH)
        last = write_json(recent_json(_own(recent, scope)))
        await response.write(f"id: {recent.position}\ndata: ".encode() + last + b"\n\n")
        await response.write(b"event: state\ndata: %b\n\n" % write_json(self._state(scope)))
        ends = {} if scope.person else await asyncio.to_thread(self._ends)
        await response.write(b"event: end\ndata: %b\n\n" % write_json(ends))

    async def _pause(self) -> None:
        """Until the next poll, or until the streams end."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._closing.wait()
        except TimeoutError:
            pass


def _own(recent: Recent, scope: Scope) -> Recent:
    """What happened in these sessions."""
    return replace(
        recent,
        begun=[head for head in recent.begun if scope.has(head.session_id)],
        answered=[head for head in recent.answered if scope.has(head.session_id)],
        events=[event for event in recent.events if scope.has(event["session_id"])],
    )


def own_state(state: StateJson, scope: Scope) -> StateJson:
    """What a person is shown of it: no runs, no sessions of others, and no learners of others."""
    return {
        **state,
        "runs": [],
        "rule_faults": [each for each in state["rule_faults"] if scope.has(each["session"])],
        "learners": [each for each in state["learners"] if each["person"] == scope.person],
    }
