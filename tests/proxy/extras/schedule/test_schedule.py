"""The schedule's decisions, without engines and without waiting."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from proxy.extras.schedule.schedule import RoomGrant, SessionSchedule

MAX_WAIT_S = 50.0


def ids(grants: list[RoomGrant]) -> list[str]:
    return [grant.call.call_id for grant in grants]


@pytest.fixture
def schedule() -> SessionSchedule:
    schedule = SessionSchedule()
    schedule.set_capacity("gpu", 1000)
    return schedule


def test_single_session_never_waits_even_if_its_path_exceeds_the_cache(
    schedule: SessionSchedule,
) -> None:
    assert ids(schedule.arrive("a0", "a", 5000, ["gpu"], 0)) == ["a0"]
    schedule.ended("a0", 5000, 1)
    assert ids(schedule.arrive("a1", "a", 9000, ["gpu"], 2)) == ["a1"]


def test_paused_call_is_admitted_when_a_session_ends(schedule: SessionSchedule) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    assert schedule.arrive("b0", "b", 400, ["gpu"], 1) == []
    assert schedule.ended("a0", 800, 2) == []  # a is at its tools, and will need its path
    assert ids(schedule.forget("a", 3)) == ["b0"]


def test_admitted_session_continues_at_once_while_others_wait(schedule: SessionSchedule) -> None:
    schedule.arrive("a0", "a", 700, ["gpu"], 0)
    schedule.arrive("b0", "b", 400, ["gpu"], 1)
    schedule.ended("a0", 700, 2)
    assert ids(schedule.arrive("a1", "a", 900, ["gpu"], 3)) == ["a1"]


def test_session_that_is_away_for_long_gives_its_room_to_a_paused_one(
    schedule: SessionSchedule,
) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    schedule.arrive("b0", "b", 400, ["gpu"], 1)
    schedule.ended("a0", 800, 2)
    due_s = schedule.due_s(2)
    assert due_s == 2 + schedule.away.usual_s
    assert schedule.due(due_s - 1) == []
    assert ids(schedule.due(due_s + 1)) == ["b0"]


def test_long_path_goes_before_a_short_one(schedule: SessionSchedule) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    schedule.arrive("short", "b", 300, ["gpu"], 1)
    schedule.arrive("long", "c", 700, ["gpu"], 2)
    schedule.ended("a0", 800, 3)
    assert ids(schedule.forget("a", 3)) == ["long"]


def test_session_of_a_group_that_has_almost_ended_goes_first(schedule: SessionSchedule) -> None:
    for n in range(3):
        schedule.arrive(f"g{n}", f"done-{n}", 10, ["gpu"], 0, group="g")
        schedule.ended(f"g{n}", 10, 0)
    schedule.arrive("a0", "a", 800, ["gpu"], 1)
    schedule.arrive("long", "c", 700, ["gpu"], 2, group="other")
    schedule.arrive("last of g", "b", 300, ["gpu"], 2, group="g")
    for n in range(3):
        schedule.forget(f"done-{n}", 3)
    schedule.arrive("second of g", "d", 300, ["gpu"], 4, group="g")
    schedule.ended("a0", 800, 5)
    assert ids(schedule.forget("a", 5)) == ["second of g", "last of g"]


def test_overdue_call_goes_as_a_guest_and_leaves_no_seat(schedule: SessionSchedule) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    schedule.arrive("b0", "b", 400, ["gpu"], 1)
    grant = schedule.overdue("b0")
    assert grant is not None
    assert grant.overdue
    schedule.ended("b0", 400, 5)
    assert schedule.seated == 1
    assert schedule.arrive("b1", "b", 500, ["gpu"], 6) == []


def test_new_session_goes_to_the_replica_with_the_most_room(schedule: SessionSchedule) -> None:
    schedule.set_capacity("other", 1000)
    both = ["gpu", "other"]
    assert schedule.arrive("a0", "a", 500, both, 0)[0].replica == "gpu"
    assert schedule.arrive("b0", "b", 100, both, 0)[0].replica == "other"
    assert schedule.arrive("c0", "c", 100, both, 0)[0].replica == "other"


def test_paused_session_moves_to_a_replica_that_gets_room(schedule: SessionSchedule) -> None:
    schedule.set_capacity("other", 1000)
    both = ["gpu", "other"]
    schedule.arrive("a0", "a", 800, both, 0)
    schedule.arrive("b0", "b", 850, both, 0)
    schedule.arrive("c0", "c", 400, both, 1)
    waits_at = next(n for n in both if (book := schedule.ledger(n)) is not None and book.waiting)
    mover, moved_to = ("a", "gpu") if waits_at == "other" else ("b", "other")
    schedule.ended(f"{mover}0", 800, 2)
    (grant,) = schedule.forget(mover, 2)
    assert (grant.call.call_id, grant.replica) == ("c0", moved_to)


def test_lost_replica_forgets_its_seats_and_its_waiting_calls(schedule: SessionSchedule) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    schedule.arrive("b0", "b", 400, ["gpu"], 1)
    assert schedule.lost("gpu") == ["b0"]
    assert not schedule.active
    schedule.set_capacity("gpu", 1000)
    assert (schedule.seated, schedule.waiting) == (0, 0)
    assert ids(schedule.arrive("b0", "b", 400, ["gpu"], 2)) == ["b0"]
    assert schedule.ended("a0", 900, 3) == []
    assert schedule.seated == 1


def test_failed_replica_admits_nothing_until_it_is_up_and_counts_its_running_calls(
    schedule: SessionSchedule,
) -> None:
    schedule.arrive("a0", "a", 800, ["gpu"], 0)
    schedule.arrive("b0", "b", 400, ["gpu"], 1)
    assert schedule.failed("gpu") == ["b0"]
    assert schedule.failed("gpu") == []
    assert schedule.arrive("b0", "b", 400, ["gpu"], 2) == []
    assert schedule.arrive("c0", "c", 100, ["gpu"], 2) == []
    assert schedule.turn_away() == ["b0", "c0"]  # the longer path goes first
    schedule.set_capacity("gpu", 1000)
    assert schedule.arrive("b0", "b", 400, ["gpu"], 3) == []
    schedule.ended("a0", 800, 4)
    assert ids(schedule.forget("a", 4)) == ["b0"]


class ScheduleMachine(RuleBasedStateMachine):
    """Sessions with concurrent calls on two replicas, which fail and come back."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.schedule = SessionSchedule()
        self.now_s = 0.0
        self.number = 0
        self.capacities = {"x": 1000, "y": 600}
        for name, tokens in self.capacities.items():
            self.schedule.set_capacity(name, tokens)
        self.waiting: dict[str, float] = {}
        self.sampling: dict[str, str] = {}
        self.guests: set[str] = set()
        self.session_of: dict[str, str] = {}

    def granted(self, grants: list[RoomGrant]) -> None:
        for grant in grants:
            call_id = grant.call.call_id
            assert call_id in self.waiting, "granted twice, or never arrived"
            del self.waiting[call_id]
            self.sampling[call_id] = grant.replica
            assert grant.overdue or not self.is_down(grant.replica), "admitted to a failed replica"
            if grant.overdue:
                self.guests.add(grant.call.session_id)

    def is_down(self, name: str) -> bool:
        book = self.schedule.ledger(name)
        return book is not None and book.down

    @rule(target=sessions, name=st.sampled_from("abcdefgh"))
    def session(self, name: str) -> str:
        return name

    @rule(session=sessions, tokens=st.integers(1, 900), group=st.sampled_from(["", "g", "h"]))
    def arrive(self, session: str, tokens: int, group: str) -> None:
        known = [name for name in self.capacities if self.schedule.covers([name])]
        up = [name for name in known if not self.is_down(name)]
        if not known:
            return
        self.number += 1
        call_id = f"{session}#{self.number}"
        self.session_of[call_id] = session
        self.waiting[call_id] = self.now_s
        idle = not any(
            set(book.seats) - {session} or book.waiting
            for name in up
            if (book := self.schedule.ledger(name)) is not None
        )
        replicas = up or known
        self.granted(
            self.schedule.arrive(call_id, session, tokens, replicas, self.now_s, group=group)
        )
        if idle and up:
            assert call_id in self.sampling, "a session alone waited"

    @precondition(lambda self: self.sampling)
    @rule(data=st.data(), tokens=st.integers(0, 1200))
    def end(self, data: st.DataObject, tokens: int) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.sampling)))
        del self.sampling[call_id]
        self.granted(self.schedule.ended(call_id, tokens, self.now_s))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[call_id]
        self.schedule.left(call_id, self.now_s)

    @rule(session=sessions)
    def forget(self, session: str) -> None:
        self.guests.discard(session)
        self.granted(self.schedule.forget(session, self.now_s))

    @rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for call_id, arrived_s in list(self.waiting.items()):
            if self.now_s - arrived_s >= MAX_WAIT_S:
                grant = self.schedule.overdue(call_id)
                assert grant is not None, "a call that waits cannot be admitted when it is overdue"
                self.granted([grant])
        self.granted(self.schedule.due(self.now_s))

    @rule(name=st.sampled_from("xy"))
    def lose(self, name: str) -> None:
        for call_id in self.schedule.lost(name):
            del self.waiting[call_id]

    @rule(name=st.sampled_from("xy"))
    def fail(self, name: str) -> None:
        book = self.schedule.ledger(name)
        seats = book and dict(book.seats)
        for call_id in self.schedule.failed(name):
            del self.waiting[call_id]
        assert seats == (book and dict(book.seats)), "a session lost its seat"

    @rule(name=st.sampled_from("xy"))
    def come_back(self, name: str) -> None:
        for call_id in self.schedule.turn_away():
            del self.waiting[call_id]
        self.schedule.set_capacity(name, self.capacities[name])

    @invariant()
    def admitted_sessions_fit(self) -> None:
        for name, capacity in self.capacities.items():
            book = self.schedule.ledger(name)
            if book is None:
                continue
            assert book.used == sum(seat.tokens for seat in book.seats.values())
            admitted = [seat for seat in book.seats.values() if not seat.guest]
            if len(admitted) > 1:
                assert sum(seat.tokens for seat in admitted) <= capacity
            running = {call for seat in book.seats.values() for call in seat.running}
            assert running <= set(self.sampling)

    @invariant()
    def every_call_is_known_exactly_once(self) -> None:
        books = [book for name in self.capacities if (book := self.schedule.ledger(name))]
        queued = [call.call_id for book in books for call in book.waiting]
        assert sorted(queued) == sorted(self.waiting)

    @invariant()
    def nothing_waits_for_an_empty_cache(self) -> None:
        for name in self.capacities:
            book = self.schedule.ledger(name)
            if book is not None and book.waiting and not book.down:
                assert book.seats

    def teardown(self) -> None:
        for call_id in list(self.waiting):
            self.schedule.left(call_id, self.now_s)
        self.waiting.clear()
        for call_id in list(self.sampling):
            self.granted(self.schedule.ended(call_id, 1, self.now_s))
        for session in "abcdefgh":
            self.granted(self.schedule.forget(session, self.now_s))
        assert (self.schedule.waiting, self.schedule.seated) == (0, 0)


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
