"""The lanes of a trace, from turns whose times the tests choose."""

from __future__ import annotations

import asyncio
import json
import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.extras.view.trace import ENGINES, FIRST_TRIAL, TRIAL_LANE, trace_pieces
from proxy.records import FinishReason, Origin, Session, SessionKind, SessionStatus, TurnStatus
from proxy.store.browser import SessionPage, SessionSummary, TurnHead
from tests.proxy.extras.view.trace_rules import Event, events_of

BEGAN = 1_780_000_000.0


def head(
    index: int,
    start: float,
    seconds: float | None,
    *,
    engine: str = "gpu-0",
    first: float | None = None,
    finish: FinishReason = FinishReason.TOOL_CALLS,
) -> TurnHead:
    """`start` counts from `BEGAN`."""
    return TurnHead(
        session_id="t",
        index=index,
        parent=None,
        shared_tokens=0,
        fork_cause=None,
        dialect="chat",
        agent_id=None,
        started_at=BEGAN + start,
        new_tokens=7,
        after=None,
        same_as=None,
        status=TurnStatus.OPEN if seconds is None else TurnStatus.DONE,
        finish_reason=finish,
        versions=(),
        first_token_s=first,
        duration_s=seconds,
        sampled_tokens=5,
        engine=engine,
    )


@dataclass
class OneSession:
    """A store with one session, as the trace reads it."""

    heads_of_all: Sequence[TurnHead]
    origin: Origin | None = None

    @property
    def summary(self) -> SessionSummary:
        session = Session(
            session_id="t",
            key_hash=b"",
            kind=SessionKind.TRAIN,
            status=SessionStatus.COMPLETED,
            created_at=BEGAN,
            expires_at=BEGAN + 100,
            completed_at=BEGAN + 20,
            origin=self.origin,
        )
        return SessionSummary(session)

    async def session(self, session_id: str) -> SessionSummary | None:
        return self.summary if session_id == "t" else None

    async def sessions(self, page: SessionPage) -> list[SessionSummary]:
        return [self.summary] if page.before is None else []

    async def heads(self, session_id: str, since: int, limit: int) -> list[TurnHead]:
        assert session_id == "t"
        return [each for each in self.heads_of_all[since:] if each.index >= since][:limit]

    async def begun(self, after: int, limit: int) -> list[tuple[int, TurnHead]]:
        page = self.heads_of_all[after : after + limit]
        return [(after + n, each) for n, each in enumerate(page, 1)]


LINE: dict[str, Any] = {
    "step": 3,
    "kind": "train",
    "trial_id": "t",
    "task_id": "sum-17",
    "status": "done",
    "reward": 1.0,
    "seconds": 20.0,
    "started_at": BEGAN,
    "times_s": {"opening": 1.0, "agent": 16.0, "verifier": 2.0},
}


async def trace_of(folder: Path, store: Any = None, **files: Sequence[Any]) -> list[Event]:
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return events_of(b"".join([piece async for piece in trace_pieces(folder, store)]))


def spans(events: Sequence[Event], pid: int, tid: int) -> list[tuple[str, float, float]]:
    """Name, and begin and end in seconds after `BEGAN`, of a lane's spans."""
    return [
        (event["name"], event["ts"] / 1e6 - BEGAN, (event["ts"] + event["dur"]) / 1e6 - BEGAN)
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, tid)
    ]


async def test_trial_shows_its_agent_the_time_between_calls_and_its_verifier(
    tmp_path: Path,
) -> None:
    store = OneSession(
        [head(0, 2, 3, first=1), head(1, 7, 2), head(2, 10, 4, finish=FinishReason.STOP)]
    )
    events = await trace_of(tmp_path, store, trials=[LINE])
    assert spans(events, FIRST_TRIAL, TRIAL_LANE) == [
        ("sum-17", 0, 20),
        ("opening", 0, 1),
        ("agent runs", 1, 17),
        ("agent", 1, 2),
        ("tools", 5, 7),
        ("tools", 9, 10),
        ("agent", 14, 17),
        ("verifier", 18, 20),
    ]
    assert spans(events, FIRST_TRIAL, TRIAL_LANE + 1) == [
        ("sampling 0", 2, 5),
        ("until the first token", 2, 3),
        ("sampling 1", 7, 9),
        ("sampling 2", 10, 14),
    ]


async def test_calls_that_overlap_are_on_lanes_of_their_own_and_counted_per_engine(
    tmp_path: Path,
) -> None:
    store = OneSession([head(0, 2, 4), head(1, 3, 4), head(2, 6, 2), head(3, 6, 1, engine="gpu-1")])
    events = await trace_of(tmp_path, store, trials=[LINE])
    assert [name for name, *_ in spans(events, FIRST_TRIAL, 2)] == ["sampling 0", "sampling 2"]
    assert [name for name, *_ in spans(events, FIRST_TRIAL, 3)] == ["sampling 1"]
    assert [name for name, *_ in spans(events, FIRST_TRIAL, 4)] == ["sampling 3"]
    counted = [
        (event["name"].partition(":")[0], event["ts"] / 1e6 - BEGAN, event["args"]["calls"])
        for event in events
        if event["ph"] == "C"
    ]
    assert counted == [
        *[("gpu-0", 2, 1), ("gpu-0", 3, 2), ("gpu-0", 6, 1), ("gpu-0", 6, 2)],
        *[("gpu-1", 6, 1), ("gpu-0", 7, 1), ("gpu-1", 7, 0), ("gpu-0", 8, 0)],
    ]


async def test_branch_begins_with_the_replay_of_its_recorded_turns(tmp_path: Path) -> None:
    store = OneSession([head(0, -50, 1), head(1, -40, 1), head(2, 4, 2)], Origin("trunk", 2))
    events = await trace_of(tmp_path, store, trials=[LINE])
    assert ("replay of 2 turns of trunk", 1, 4) in spans(events, FIRST_TRIAL, TRIAL_LANE)
    assert spans(events, FIRST_TRIAL, TRIAL_LANE + 1) == [("sampling 2", 4, 6)]


async def test_engines_show_weight_updates_with_the_pause_at_their_end(tmp_path: Path) -> None:
    phase = {"step": 3, "phase": "sending weights", "started_at": BEGAN + 12, "seconds": 3.0}
    events = await trace_of(
        tmp_path,
        OneSession([head(0, 2, 4)]),
        trials=[LINE],
        phases=[phase, {**phase, "phase": "training", "started_at": BEGAN + 8}],
        metrics=[{"step": 3, "sync/paused_s": 0.5}],
    )
    assert spans(events, ENGINES, 1) == [("weights", 12, 15), ("paused", 14.5, 15)]
    assert spans(events, 1, 1) == [("sending weights", 12, 15), ("training", 8, 11)]


async def test_session_without_a_line_of_its_trial_is_shown_until_it_ended(tmp_path: Path) -> None:
    events = await trace_of(tmp_path, OneSession([head(0, 2, 4), head(1, 7, None)]))
    assert spans(events, FIRST_TRIAL, TRIAL_LANE)[0] == ("t", 0, 20)
    assert spans(events, FIRST_TRIAL, TRIAL_LANE + 1) == [("sampling 0", 2, 6)]


async def test_lines_of_a_foreign_program_are_shown_or_left_out(tmp_path: Path) -> None:
    lines = [
        {"trial_id": 7},
        {"trial_id": "no-times"},
        {"trial_id": "\ud800" * 3, "started_at": BEGAN, "seconds": math.inf, "reward": math.nan},
        {"trial_id": "text", "started_at": "soon", "seconds": "1", "times_s": []},
        {"trial_id": "x" * 9999, "started_at": BEGAN, "seconds": -5, "times_s": {"agent": "2"}},
        {"trial_id": "huge", "started_at": 1e300, "seconds": 1e300, "times_s": {"verifier": 1e9}},
        {"trial_id": "long", "started_at": 10**400},
        {"trial_id": "nested", "started_at": BEGAN, "reward": {"x": math.nan}, "group": [1]},
    ]
    phases = [
        {"phase": None},
        {"phase": 3, "started_at": BEGAN, "seconds": None},
        {"phase": "sending weights", "started_at": BEGAN, "step": [math.nan]},
    ]
    metrics = [{"step": [1], "sync/paused_s": 1}, {"step": {}, "sync/paused_s": 1}]
    store = OneSession([head(0, 2, 4)])
    events = await trace_of(tmp_path, store, trials=lines, phases=phases, metrics=metrics)
    shown = [event for event in events if event["ph"] == "X" and event["pid"] >= FIRST_TRIAL]
    assert len({event["pid"] for event in shown}) == 4  # with the session of the store
    assert all(len(event["name"]) <= 200 for event in events)


times = st.floats(0, 30, allow_nan=False).map(lambda each: round(each, 7))


@settings(deadline=None, max_examples=50)
@given(
    calls=st.lists(st.tuples(times, st.none() | times, st.none() | times), max_size=12),
    opening=times,
    agent=st.none() | times,
    verifier=times,
    seconds=times,
)
def test_lanes_nest_whatever_the_times(
    calls: list[tuple[float, float | None, float | None]],
    opening: float,
    agent: float | None,
    verifier: float,
    seconds: float,
) -> None:
    heads = [head(n, start, took, first=first) for n, (start, took, first) in enumerate(calls)]
    times_s = {"opening": opening, "verifier": verifier}
    times_s |= {} if agent is None else {"agent": agent}
    line = {**LINE, "seconds": seconds, "times_s": times_s}
    with TemporaryDirectory() as folder:
        events = asyncio.run(trace_of(Path(folder), OneSession(heads), trials=[line]))
    ended = sum(took is not None for _, took, _ in calls)
    assert sum(event["name"].startswith("sampling") for event in events) == ended


class Endless:
    """A sequence of turns, each made when it is read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, at: slice) -> list[TurnHead]:
        start, stop, _ = at.indices(self.size)
        return [head(n, n * 1e-3, 5e-4, first=1e-4) for n in range(start, min(stop, start + 500))]


async def test_memory_does_not_grow_with_the_number_of_turns(tmp_path: Path) -> None:
    turns = 20_000
    store: Any = OneSession(Endless(turns))  # type: ignore[arg-type]
    (tmp_path / "trials.jsonl").write_text(json.dumps({**LINE, "seconds": 30.0}) + "\n")
    sampled = size = 0
    tracemalloc.start()
    try:
        async for piece in trace_pieces(tmp_path, store):
            sampled += piece.count(b'"sampling ')
            size += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sampled == turns
    assert size > 10_000_000
    assert peak < 3_000_000
