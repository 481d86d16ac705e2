"""The sessions that may use one replica's KV cache, and the calls that wait for room in it.

A session with a *seat* is admitted: its path is in the cache or will be with its next call, and the
cache has room for it. A session without one is paused: its next call waits.

    no seat ─▶ sampling ⇄ away ─▶ no seat

no seat   → sampling  there is room; or the call has waited as long as it may (a *guest*).
sampling  a call of the session is at the engine. → away      the last one has ended.
                                                  → no seat   the session was a guest.
away      the session is at its tools. → sampling  its next call arrives, and its growth fits.
                                       → no seat   its room is needed, and it has been away for
                                                   long; or the session has ended.

Invariant: the seats of sessions that are no guests need at most `capacity` tokens, unless only one
session samples. `used` is the sum of all seats.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that needs room in a cache.

    Example: PendingCall("t-1#7", "t-1", tokens=12_350, rank=(1, -12_350), arrived_s=3.5)
    """

    call_id: str
    session_id: str
    tokens: int
    """Tokens of the prompt and the expected answer that no other call of the session needs."""
    rank: tuple[int, int] = (0, 0)
    """Calls with a lower rank go first."""
    arrived_s: float = 0.0
    replicas: tuple[str, ...] = ()
    """The replicas that may serve the call."""


@dataclass(slots=True)
class CacheSeat:
    """A session's part of the cache."""

    tokens: int = 0
    """Tokens of the calls that are sampled, or of the path that the last one left behind."""
    running: dict[str, int] = field(default_factory=dict)
    """The tokens of each call that is sampled."""
    away_since_s: float = 0.0
    guest: bool = False


class Ledger:
    """One replica."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.down = False
        """The replica has failed, and no health check has succeeded since."""
        self.used = 0
        self.seats: OrderedDict[str, CacheSeat] = OrderedDict()
        """By session; the one whose last call ended longest ago is first among those away."""
        self.waiting: list[PendingCall] = []
        """Sorted by rank."""

    @property
    def backlog(self) -> int:
        """Tokens of the seats and of the calls that wait."""
        return self.used + sum(call.tokens for call in self.waiting)

    def missing(self, call: PendingCall) -> int:
        """Number of tokens by which the session's seat would grow."""
        seat = self.seats.get(call.session_id)
        return call.tokens if seat is None or seat.running else call.tokens - seat.tokens

    def make_room(self, call: PendingCall, *, limit: int, away_before_s: float) -> bool:
        """Whether the call fits below `limit` tokens, once other sessions that have been away since
        before `away_before_s` have lost their seats. They lose them only if it fits."""
        need = self.used + self.missing(call) - limit
        if need <= 0:
            return True
        freed, going = 0, []
        for session_id, seat in self.seats.items():
            if freed >= need:
                break
            if seat.running or session_id == call.session_id:
                continue
            if seat.away_since_s >= away_before_s:
                break
            freed += seat.tokens
            going.append(session_id)
        if freed < need and not self._alone(call, len(going)):
            return False
        for session_id in going:
            self.remove(session_id)
        return True

    def _alone(self, call: PendingCall, going: int) -> bool:
        others = len(self.seats) - (call.session_id in self.seats)
        return others == going

    def begin(self, call: PendingCall, *, guest: bool = False) -> None:
        """The call goes to the engine. A guest makes its whole session one."""
        seat = self.seats.setdefault(call.session_id, CacheSeat())
        seat.guest = seat.guest or guest
        seat.running[call.call_id] = call.tokens
        self._resize(seat, sum(seat.running.values()))
        self.seats.move_to_end(call.session_id)

    def end(self, call: PendingCall, tokens: int, now_s: float) -> None:
        """The call has ended, with a path of `tokens` tokens."""
        seat = self.seats.get(call.session_id)
        if seat is None or seat.running.pop(call.call_id, None) is None:
            return
        self._resize(seat, sum(seat.running.values()) or tokens)
        seat.away_since_s = now_s
        self.seats.move_to_end(call.session_id)
        if seat.guest and not seat.running:
            self.remove(call.session_id)
        self._shrink()

    def remove(self, session_id: str) -> None:
        seat = self.seats.pop(session_id, None)
        if seat is not None:
            self.used -= seat.tokens

    def wait(self, call: PendingCall) -> None:
        insort(self.waiting, call, key=lambda c: c.rank)

    def first_away_s(self, after_s: float) -> float | None:
        """When the first session that left after `after_s` and is still away did so; None if there
        is none."""
        away = (s.away_since_s for s in self.seats.values() if not s.running)
        return next((left_s for left_s in away if left_s > after_s), None)

    def _shrink(self) -> None:
        """Takes seats from sessions that are away, until the others fit: an answer was longer than
        expected."""
        while self.used > self.capacity and len(self.seats) > 1:
            away = next((s for s, seat in self.seats.items() if not seat.running), None)
            if away is None:
                return
            self.remove(away)

    def _resize(self, seat: CacheSeat, tokens: int) -> None:
        self.used += tokens - seat.tokens
        seat.tokens = tokens
