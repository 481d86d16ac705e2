"""Lets calls wait until the schedule admits them.

Invariant: a call waits for at most the time that it allows (and never longer than
`scheduling.max_wait_s`), and one whose client leaves while it waits is forgotten at once. Where an
engine does not report its cache's size, or nothing has to wait, a call passes without a pause.
While all engines that could serve a call have failed, it waits for one that is healthy again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from proxy.extras.schedule.openings import Openings
from proxy.extras.schedule.schedule import RoomGrant, SessionSchedule
from proxy.extras.schedule.section import SchedulingConfig
from proxy.routing.cache_room import RoomClaim

FIRST_ANSWER_TOKENS = 256.0
"""The expected length of an answer before any has ended."""
TIMER_S = 0.01
"""Added to the time of the next look, because a timer may fire a little early."""
WEIGHT = 0.05
"""The weight of each answer in the mean length."""


class CacheAdmission:
    """Implements `proxy.routing.cache_room.CacheRoom`. One event loop uses it."""

    def __init__(
        self,
        config: SchedulingConfig,
        *,
        share: float = 1.0,
        on_admitted: Callable[[float, bool], None] = lambda waited_s, overdue: None,
    ) -> None:
        """`share` is the part of the configured share that is this process's. `on_admitted` gets
        for each call the seconds that it waited, and whether it had waited as long as it may."""
        self.schedule = SessionSchedule(config.cache_share * share)
        self._openings = Openings()
        self._max_wait_s = config.max_wait_s
        self._on_admitted = on_admitted
        self._answer_tokens = FIRST_ANSWER_TOKENS
        self._waiting: dict[str, asyncio.Future[RoomGrant | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """Whether any call may have to wait."""
        return self.schedule.active

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return self.schedule.waiting

    def report(self, replica: str, cache_tokens: int | None) -> None:
        """The replica is healthy, and its KV cache holds this many tokens, if that is known."""
        turned_away = self.schedule.turn_away()
        if cache_tokens is None:
            self.lost(replica)
        else:
            self.schedule.set_capacity(replica, cache_tokens)
        self._arrive_again(turned_away)

    def failed(self, replica: str) -> None:
        """The replica failed. Its waiting calls look for another one; if there is none, they and
        new calls wait until `report`."""
        self._arrive_again(self.schedule.failed(replica))

    def lost(self, replica: str) -> None:
        """The replica was removed, or does not report its cache. Its waiting calls look for another
        one."""
        self._arrive_again(self.schedule.lost(replica))

    def knows(self, replica: str) -> bool:
        """Whether the replica has reported its cache, even if it is down now."""
        return self.schedule.covers([replica])

    async def admitted(self, claim: RoomClaim, usable: Callable[[], list[str]]) -> str | None:
        """Returns when the call may go to an engine: to this replica, or to any (None). `usable`
        returns the names of the healthy replicas that can serve it; if none is healthy, those
        whose caches are known (`knows`), for which it waits."""
        loop = asyncio.get_running_loop()
        allowed_s = self._max_wait_s
        if claim.max_wait_s is not None:
            allowed_s = min(allowed_s, claim.max_wait_s)
        began_s = loop.time()
        while self.schedule.covers(names := usable()):
            if claim.prompt is not None:
                self._openings.arrive(claim.session_id, claim.prompt)
            own = self._openings.own(claim.session_id, claim.prompt_tokens)
            tokens = own + round(min(claim.max_tokens, self._answer_tokens))
            now_s = loop.time()
            future = self._waiting[claim.call_id] = loop.create_future()
            self._grant(
                self.schedule.arrive(
                    claim.call_id, claim.session_id, tokens, names, now_s, group=claim.group
                )
            )
            grant = await self._granted(claim.call_id, future, began_s + allowed_s)
            if grant is not None:
                self._on_admitted(loop.time() - began_s, grant.overdue)
                return grant.replica
        return None

    def ended(self, session_id: str, call_id: str, path_tokens: int, answer_tokens: int) -> None:
        """The call has ended, with these numbers of tokens."""
        if answer_tokens:
            self._answer_tokens += WEIGHT * (answer_tokens - self._answer_tokens)
        self._leave(call_id, self._openings.own(session_id, path_tokens))

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._openings.forget(session_id)
        if self.schedule.active:
            now_s = asyncio.get_running_loop().time()
            self._grant(self.schedule.forget(session_id, now_s))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _granted(
        self, call_id: str, future: asyncio.Future[RoomGrant | None], deadline_s: float
    ) -> RoomGrant | None:
        """The grant of a call that has arrived; None if its replica was lost."""
        try:
            if not future.done():
                self._look_again()
                left_s = deadline_s - asyncio.get_running_loop().time()
                # Unlike a timeout around the future, `wait` leaves the future as it is, so a grant
                # at the same moment is found in it and counts.
                await asyncio.wait([future], timeout=left_s)
            return future.result() if future.done() else self.schedule.overdue(call_id)
        except asyncio.CancelledError:
            if future.done() and future.result() is not None:
                self._leave(call_id, 0)
            else:
                self.schedule.left(call_id, asyncio.get_running_loop().time())
            raise
        finally:
            self._waiting.pop(call_id, None)

    def _leave(self, call_id: str, tokens: int) -> None:
        """A call that was granted has ended. Its session may now be away for long."""
        self._grant(self.schedule.ended(call_id, tokens, asyncio.get_running_loop().time()))
        self._look_again()

    def _grant(self, grants: Iterable[RoomGrant]) -> None:
        for grant in grants:
            self._answer(grant.call.call_id, grant)

    def _answer(self, call_id: str, grant: RoomGrant | None) -> None:
        future = self._waiting.get(call_id)
        if future is not None and not future.done():
            future.set_result(grant)

    def _arrive_again(self, call_ids: Iterable[str]) -> None:
        for call_id in call_ids:
            self._answer(call_id, None)

    def _look_again(self) -> None:
        """Sets the timer for sessions that will have been away for long."""
        loop = asyncio.get_running_loop()
        due_s = self.schedule.due_s(loop.time())
        if due_s is None:
            return
        if self._timer is not None:
            if self._timer.when() <= due_s + TIMER_S:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s + TIMER_S, self._due)

    def _due(self) -> None:
        self._timer = None
        self._grant(self.schedule.due(asyncio.get_running_loop().time()))
        self._look_again()
