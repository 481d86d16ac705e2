"""Decides which sessions may sample now, so that their paths fit the engines' KV caches.

An engine with more sessions than its cache holds drops a session's path while the session is at its
tools, and computes all of it again for the next call. Here a session is admitted as a whole (it
gets a *seat*, see `ledger`): its calls go to the engine at once, and its path stays in the cache.
The calls of other sessions wait. This module makes decisions only: it starts nothing, waits for
nothing, and gets the time from its caller (`admission`).

Who goes first: a session of a group of which most have ended, so that the group becomes complete;
then the session with the longest path, because it is the most expensive one to compute again and
usually the nearest to its end. What frees room: the end of a session, and a session that has been
away for longer than most tool calls take.

Invariants:
- The seats of admitted sessions need at most `share` of the capacity, unless one session alone
  needs more. A call that has waited as long as it may goes to the engine as a *guest*, in addition.
- A call that arrives when no other session has a seat at a replica that is up never waits.
- Nothing is admitted to a replica that is down, but its sessions keep their seats: their calls may
  still run, and an engine that has lost their paths computes each of them again only once.
- Nothing waits for a replica that is lost.
- Every call that arrived ends with `ended` or `left`; then nothing of it is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.extras.schedule.away import AwayTimes
from proxy.extras.schedule.ledger import Ledger, PendingCall

REMEMBERED_SESSIONS = 100_000
"""With more sessions, the one that was idle longest is forgotten."""
ADMIT_BELOW = 0.85
"""The share of a cache up to which paused sessions are admitted. The rest is for the growth of the
admitted ones, and for the paths of sessions that have ended, which an engine drops only when they
were unused for longest."""
EXAMINED = 32
"""Number of waiting calls of a replica that are examined when room appears."""
PREFILL_TOKENS_S = 4000.0
"""A cautious estimate of an engine's prefill speed. A paused call that has waited for as long as it
takes to compute its path again may move to another replica."""


@dataclass(slots=True)
class _Known:
    """What is remembered of a session."""

    group: str
    home: str = ""
    ended_s: float | None = None
    """When its last call ended; None while it samples, and before."""
    calls: int = 0
    """Calls that wait or are sampled."""


@dataclass(slots=True)
class _Group:
    open: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class RoomGrant:
    """A call that may go to the engine now."""

    call: PendingCall
    replica: str
    overdue: bool = False


class SessionSchedule:
    """All replicas of one proxy. Times are in seconds of any one clock."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` is the share of each cache that the sessions of this proxy may use."""
        self.away = AwayTimes()
        self._share = share
        self._ledgers: dict[str, Ledger] = {}
        self._places: dict[str, tuple[PendingCall, str]] = {}
        """The calls that wait or are sampled, with their replica."""
        self._sessions: OrderedDict[str, _Known] = OrderedDict()
        self._groups: dict[str, _Group] = {}

    @property
    def active(self) -> bool:
        """Whether any replica reports its capacity."""
        return bool(self._ledgers)

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        return sum(len(ledger.waiting) for ledger in self._ledgers.values())

    @property
    def seated(self) -> int:
        """Number of sessions that are admitted."""
        return sum(len(ledger.seats) for ledger in self._ledgers.values())

    def ledger(self, replica: str) -> Ledger | None:
        return self._ledgers.get(replica)

    def covers(self, replicas: Sequence[str]) -> bool:
        """Whether each of these replicas reports its capacity."""
        return bool(replicas) and all(name in self._ledgers for name in replicas)

    def set_capacity(self, replica: str, tokens: int) -> None:
        """The replica is up, and `tokens` is the size of its whole KV cache. To be called after
        `turn_away`, if it was down."""
        capacity = max(1, int(tokens * self._share))
        ledger = self._ledgers.setdefault(replica, Ledger(capacity))
        ledger.capacity = capacity
        ledger.down = False

    def turn_away(self) -> list[str]:
        """Returns the calls that wait for replicas that are down. They are forgotten, and may
        arrive again: a replica has become healthy."""
        down = [ledger for ledger in self._ledgers.values() if ledger.down]
        return [call_id for ledger in down for call_id in self._forget_waiting(ledger)]

    def failed(self, replica: str) -> list[str]:
        """The replica is down until `set_capacity`. Returns its waiting calls, which are forgotten:
        they may arrive again, and wait for it if there is no other."""
        ledger = self._ledgers.get(replica)
        if ledger is None or ledger.down:
            return []
        ledger.down = True
        return self._forget_waiting(ledger)

    def lost(self, replica: str) -> list[str]:
        """The replica was removed. Returns its waiting calls, which are forgotten: they may arrive
        again, for other replicas."""
        ledger = self._ledgers.pop(replica, None)
        return [] if ledger is None else self._forget_waiting(ledger)

    def arrive(
        self,
        call_id: str,
        session_id: str,
        tokens: int,
        replicas: Sequence[str],
        now_s: float,
        *,
        group: str = "",
    ) -> list[RoomGrant]:
        """A call arrives, for which all of `replicas` report their capacity. Returns the calls that
        may go now, which may include others; if the new one is not among them, it waits."""
        known = self._known(session_id, group)
        if known.ended_s is not None:
            self.away.add(now_s - known.ended_s)
            known.ended_s = None
        known.calls += 1
        rank = (self._unfinished(known.group), -tokens)
        call = PendingCall(call_id, session_id, tokens, rank, now_s, tuple(replicas))
        replica = self._best(call, known)
        if replica != known.home:
            self._vacate(known.home, session_id)
            known.home = replica
        self._places[call_id] = (call, replica)
        self._ledgers[replica].wait(call)
        return self._admit(replica, now_s)

    def ended(self, call_id: str, tokens: int, now_s: float) -> list[RoomGrant]:
        """A call that was granted has ended; the path that it leaves in the cache has `tokens`
        tokens. Returns the calls that may go now."""
        place = self._places.pop(call_id, None)
        if place is None:
            return []
        call, replica = place
        self._call_is_over(call, now_s)
        ledger = self._ledgers.get(replica)
        if ledger is None:
            return []
        ledger.end(call, tokens, now_s)
        known = self._sessions.get(call.session_id)
        if known is None or known.home != replica:
            self._vacate(replica, call.session_id)
        return self._admit(replica, now_s)

    def left(self, call_id: str, now_s: float) -> None:
        """A call that waited is not wanted any more."""
        place = self._places.pop(call_id, None)
        if place is not None:
            self._call_is_over(place[0], now_s)
            ledger = self._ledgers.get(place[1])
            if ledger is not None and place[0] in ledger.waiting:
                ledger.waiting.remove(place[0])

    def overdue(self, call_id: str) -> RoomGrant | None:
        """The call has waited as long as it may, and goes to the engine besides the others. None if
        it does not wait."""
        call, replica = self._places.get(call_id, (None, ""))
        ledger = self._ledgers.get(replica)
        if call is None or ledger is None or call not in ledger.waiting:
            return None
        ledger.waiting.remove(call)
        ledger.begin(call, guest=True)
        return RoomGrant(call, replica, overdue=True)

    def forget(self, session_id: str, now_s: float) -> list[RoomGrant]:
        """The session has ended. Returns the calls that may go now."""
        known = self._drop(session_id)
        if known is None or known.home not in self._ledgers:
            return []
        return self._admit(known.home, now_s)

    def due(self, now_s: float) -> list[RoomGrant]:
        """The calls that may go because time has passed: sessions have been away for long."""
        return [
            grant
            for name, ledger in self._ledgers.items()
            if ledger.waiting
            for grant in self._admit(name, now_s)
        ]

    def due_s(self, now_s: float) -> float | None:
        """When `due` may return calls next; None if only another event can make room."""
        usual_s = self.away.usual_s
        times = [
            left_s + usual_s
            for ledger in self._ledgers.values()
            if ledger.waiting and (left_s := ledger.first_away_s(now_s - usual_s)) is not None
        ]
        return min(times, default=None)

    def _forget_waiting(self, ledger: Ledger) -> list[str]:
        """Forgets the calls that wait for the replica; those that go first come first."""
        calls, ledger.waiting = ledger.waiting, []
        for call in calls:
            del self._places[call.call_id]
            if (known := self._sessions.get(call.session_id)) is not None:
                known.calls -= 1
        return [call.call_id for call in calls]

    def _known(self, session_id: str, group: str) -> _Known:
        known = self._sessions.get(session_id)
        if known is None:
            known = self._sessions[session_id] = _Known(group)
            if group:
                self._groups.setdefault(group, _Group()).open += 1
            if len(self._sessions) > REMEMBERED_SESSIONS:
                self._drop(next(iter(self._sessions)))
        self._sessions.move_to_end(session_id)
        return known

    def _drop(self, session_id: str) -> _Known | None:
        known = self._sessions.pop(session_id, None)
        if known is None:
            return None
        if (group := self._groups.get(known.group)) is not None:
            group.open -= 1
            group.ended += 1
            if group.open == 0:
                del self._groups[known.group]
        self._vacate(known.home, session_id)
        return known

    def _unfinished(self, name: str) -> int:
        """0 if most sessions of the group have ended, else 1."""
        group = self._groups.get(name)
        return 0 if group is not None and group.ended > group.open else 1

    def _vacate(self, replica: str, session_id: str) -> None:
        """Takes the session's seat at the replica, unless a call of it is sampled there."""
        ledger = self._ledgers.get(replica)
        if ledger is None:
            return
        seat = ledger.seats.get(session_id)
        if seat is not None and not seat.running:
            ledger.remove(session_id)

    def _best(self, call: PendingCall, known: _Known) -> str:
        """The replica that takes the call now, or in whose queue it waits."""
        home = self._ledgers.get(known.home) if known.home in call.replicas else None
        if home is not None and (call.session_id in home.seats or self._has_room(home, call)):
            return known.home
        others = {name: self._ledgers[name] for name in call.replicas}
        free = {name: x for name, x in others.items() if not x.waiting and self._has_room(x, call)}
        if free:
            return min(free, key=lambda name: free[name].used / free[name].capacity)
        return min(others, key=lambda name: others[name].backlog / others[name].capacity)

    def _has_room(self, ledger: Ledger, call: PendingCall) -> bool:
        return ledger.used + call.tokens <= ledger.capacity * ADMIT_BELOW or not ledger.seats

    def _admit(self, replica: str, now_s: float) -> list[RoomGrant]:
        """The waiting calls of the replica that fit now, or failing that those of a busier one."""
        ledger = self._ledgers[replica]
        if ledger.down:
            return []
        away_before_s = now_s - self.away.usual_s
        grants: list[RoomGrant] = []
        for call in ledger.waiting[:EXAMINED]:
            seated = call.session_id in ledger.seats
            limit = ledger.capacity if seated else int(ledger.capacity * ADMIT_BELOW)
            before_s = now_s if seated else away_before_s
            if ledger.make_room(call, limit=limit, away_before_s=before_s):
                ledger.waiting.remove(call)
                ledger.begin(call)
                grants.append(RoomGrant(call, replica))
        return grants or self._take_over(replica, now_s)

    def _take_over(self, replica: str, now_s: float) -> list[RoomGrant]:
        """Moves a waiting call here from the replica with the most calls waiting, if this one has
        room, none of its own wait, and to compute the path again costs less than was waited."""
        ledger = self._ledgers[replica]
        if (
            ledger.waiting
            or len(self._ledgers) == 1
            or not any(other.waiting for other in self._ledgers.values())
        ):
            return []
        other = max(self._ledgers.values(), key=lambda one: len(one.waiting))
        for call in other.waiting[:EXAMINED]:
            seated = call.session_id in other.seats
            waited_s = now_s - call.arrived_s
            if replica not in call.replicas or not self._has_room(ledger, call):
                continue
            if seated and (
                other.seats[call.session_id].running or waited_s < call.tokens / PREFILL_TOKENS_S
            ):
                continue
            other.waiting.remove(call)
            other.remove(call.session_id)
            ledger.begin(call)
            self._places[call.call_id] = (call, replica)
            if (known := self._sessions.get(call.session_id)) is not None:
                known.home = replica
            return [RoomGrant(call, replica)]
        return []

    def _call_is_over(self, call: PendingCall, now_s: float) -> None:
        known = self._sessions.get(call.session_id)
        if known is not None:
            known.calls -= 1
            if known.calls == 0:
                known.ended_s = now_s
