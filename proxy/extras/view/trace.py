"""A run as a trace in Chrome's JSON format, which https://ui.perfetto.dev opens.

    {"traceEvents": [
    {"ph": "M", "pid": 10, "tid": 1, "name": "process_name", "args": {"name": "trial sum-17-x"}},
    {"ph": "X", "pid": 10, "tid": 1, "name": "agent", "ts": 1780000000100000, "dur": 2500000, …},
    …
    ]}

`ts` (Unix time) and `dur` are integers, in microseconds. Process 1 is the trainer with its phases.
Process 2 is the engines: each has a counter of its calls in flight, and a lane with its weight
updates. Every trial is a process of its own: lane 1 has the trial, its agent, what the agent does
between calls, and the verifier; the next lanes have its calls, in as many lanes as calls overlap.

Invariant: two spans of a lane do not overlap, or one contains the other and comes first. What is in
memory does not grow with the number of turns: a page of turns, the calls in flight at one moment,
and the ids of the trials.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.extras.secrets import mask
from proxy.records import FinishReason, Session
from proxy.run_files.json_lines import Line, lines_after
from proxy.store.browser import Browser, SessionPage, SessionSummary, TurnHead

Event = dict[str, Any]

TRAINER, ENGINES, FIRST_TRIAL = 1, 2, 10
"""Process numbers."""
TRIAL_LANE, FIRST_CALL_LANE = 1, 2
PAGE = 500
"""Turns, and sessions, that are read at once."""
MAX_CHARS = 200
"""Characters of a name or of a value."""
SENDING = "sending weights"
"""The phase of the trainer in which engines get new weights."""
_PIECE_EVENTS = 500


async def trace_pieces(
    folder: Path, browser: Browser | None, words: Callable[[str], str] = mask
) -> AsyncIterator[bytes]:
    """The trace of the run in `folder`, piece by piece. `browser` reads the store of its sessions;
    None: there is none. `words` makes of a trial's error what is shown."""
    # Without displayTimeUnit, which early releases of Perfetto take for the unit of `ts`.
    yield b'{"traceEvents": [\n'
    piece, separator = list[str](), ""
    async for event in _events(folder, browser, words):
        piece.append(json.dumps(event))
        if len(piece) == _PIECE_EVENTS:
            yield (separator + ",\n".join(piece)).encode()
            piece, separator = [], ",\n"
    if piece:
        yield (separator + ",\n".join(piece)).encode()
    yield b"\n]}\n"


async def _events(
    folder: Path, browser: Browser | None, words: Callable[[str], str]
) -> AsyncIterator[Event]:
    for event in _process(TRAINER, "trainer", sort=TRAINER):
        yield event
    yield _lane_name(TRAINER, 1, "phases")
    async for line in _lines(folder / "phases.jsonl"):
        if (span := _phase(line)) is not None:
            yield span
    engines = _Engines()
    if browser is not None:
        async for event in engines.calls(browser):
            yield event
    async for event in engines.updates(folder):
        yield event
    trials = _Trials(folder, browser, words)
    async for event in trials.events():
        yield event


def _phase(line: Line) -> Event | None:
    start = _number(line.get("started_at"))
    if not start:
        return None
    args = {"step": _value(line.get("step"))}
    return _span(TRAINER, 1, _text(line.get("phase")), start, _end(line, start), args)


class _Engines:
    """The engines' counters, and the weight updates of each engine that has sampled."""

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self._ends: list[tuple[float, str]] = []
        self._now = 0.0

    async def calls(self, browser: Browser) -> AsyncIterator[Event]:
        """The number of calls in flight at each engine, whenever it changes. A call that the store
        has in a place before its time counts from the time of that place."""
        place = 0
        while page := await browser.begun(place, PAGE):
            for place, head in page:  # noqa: B007
                if head.duration_s is None or not head.engine:
                    continue
                for event in self._ended(until=head.started_at):
                    yield event
                if head.engine not in self._lanes:
                    for event in self._new(head.engine):
                        yield event
                self._now = max(self._now, head.started_at)
                heapq.heappush(self._ends, (head.started_at + head.duration_s, head.engine))
                yield self._count(head.engine, 1)
        for event in self._ended(until=math.inf):
            yield event

    async def updates(self, folder: Path) -> AsyncIterator[Event]:
        """The trainer's weight updates, on the lane of each engine, with the pause at their end."""
        paused: dict[float | str | None, float] = {}
        async for line in _lines(folder / "metrics.jsonl"):
            if seconds := _number(line.get("sync/paused_s")):
                paused[_value(line.get("step"))] = seconds
        async for line in _lines(folder / "phases.jsonl"):
            start = _number(line.get("started_at"))
            if line.get("phase") != SENDING or not start:
                continue
            end, step = _end(line, start), _value(line.get("step"))
            for lane in self._lanes.values():
                yield _span(ENGINES, lane, "weights", start, end, {"step": step})
                if seconds := paused.get(step, 0.0):
                    yield _span(ENGINES, lane, "paused", max(start, end - seconds), end)

    def _new(self, engine: str) -> Iterator[Event]:
        if not self._lanes:
            yield from _process(ENGINES, "engines", sort=ENGINES)
        self._lanes[engine] = len(self._lanes) + 1
        self._in_flight[engine] = 0
        yield _lane_name(ENGINES, self._lanes[engine], f"{_text(engine)}: weights")

    def _ended(self, until: float) -> Iterator[Event]:
        while self._ends and self._ends[0][0] <= until:
            end, engine = heapq.heappop(self._ends)
            self._now = max(self._now, end)
            yield self._count(engine, -1)

    def _count(self, engine: str, change: int) -> Event:
        self._in_flight[engine] += change
        return {
            "ph": "C",
            "pid": ENGINES,
            "tid": self._lanes[engine],
            "name": f"{_text(engine)}: calls in flight",
            "ts": _us(self._now),
            "args": {"calls": self._in_flight[engine]},
        }


@dataclass(slots=True)
class _Trials:
    """The trials of `trials.jsonl`, then the sessions that it does not have: trials that still run,
    and those that were lost and run again."""

    folder: Path
    browser: Browser | None
    words: Callable[[str], str]
    _seen: set[str] = field(default_factory=set)

    async def events(self) -> AsyncIterator[Event]:
        async for line in _lines(self.folder / "trials.jsonl"):
            trial_id = line.get("trial_id")
            if not isinstance(trial_id, str) or trial_id in self._seen:
                continue
            if isinstance(error := line.get("error"), str):
                line = {**line, "error": self.words(error)}
            found = None if self.browser is None else await self.browser.session(trial_id)
            async for event in self._trial(trial_id, line, found):
                yield event
        before = None
        while self.browser is not None:
            page = await self.browser.sessions(SessionPage(before=before, limit=PAGE))
            for found in page:
                before = (found.session.created_at, found.session.session_id)
                if found.session.session_id not in self._seen:
                    async for event in self._trial(found.session.session_id, {}, found):
                        yield event
            if len(page) < PAGE:
                break

    async def _trial(
        self, trial_id: str, line: Line, found: SessionSummary | None
    ) -> AsyncIterator[Event]:
        self._seen.add(trial_id)
        trial = _Trial(FIRST_TRIAL + len(self._seen) - 1, trial_id, line, found)
        if not trial.start:
            return
        for event in trial.beginning():
            yield event
        if found is not None and self.browser is not None:
            since = found.session.recorded_turns
            while heads := await self.browser.heads(trial_id, since, PAGE):
                for head in heads:
                    for event in trial.call(head):
                        yield event
                since = heads[-1].index + 1
        for event in trial.ending():
            yield event


class _Trial:
    """The lanes of one trial, whose calls come in the order in which they began."""

    def __init__(self, pid: int, trial_id: str, line: Line, found: SessionSummary | None) -> None:
        self._pid = pid
        self._name = _text(trial_id)
        self._line = line
        self._session: Session | None = None if found is None else found.session
        self.start = _number(line.get("started_at"))
        """Unix seconds; 0: not known."""
        if found is not None and not self.start:
            self.start = found.session.created_at
        self._end = _end(line, self.start)
        if found is not None and not line:
            last = max(found.session.completed_at or 0.0, found.last_at or 0.0)
            self._end = max(self.start, last)
        times = line.get("times_s")
        times = times if isinstance(times, dict) else {}
        self._verifier = self._within(self._end - _number(times.get("verifier")))
        opening = _number(times.get("opening"))
        self._agent = min(self._verifier, self._within(self.start + opening))
        self._agent_end = self._verifier
        self._has_agent = "agent" in times
        if self._has_agent:
            self._agent_end = min(self._verifier, self._agent + _number(times["agent"]))
        self._busy = self._agent
        """Until when there is a call, or a span on the trial's lane."""
        origin = None if self._session is None else self._session.origin
        self._away = "agent"
        if origin is not None:
            self._away = f"replay of {origin.turn} turns of {_text(origin.session_id)}"
        self._lane_ends: list[float] = []

    def beginning(self) -> Iterator[Event]:
        """The trial, and the parts of it that are known without its calls."""
        line, task = self._line, _text(self._line.get("task_id", ""))
        kind = "evaluation" if line.get("kind") == "eval" else "trial"
        yield from _process(self._pid, f"{kind} {self._name}", sort=round(self.start * 10))
        yield _lane_name(self._pid, TRIAL_LANE, "trial")
        names = ("step", "kind", "group", "evaluation", "source", "status", "reward", "error")
        args = {name: _value(line[name]) for name in names if line.get(name) is not None}
        yield self._on_lane(task or self._name, self.start, self._end, args)
        if self._agent > self.start:
            yield self._on_lane("opening", self.start, self._agent)
        if self._has_agent:
            yield self._on_lane("agent runs", self._agent, self._agent_end)

    def call(self, head: TurnHead) -> Iterator[Event]:
        """A call, and what the agent did since the calls before it."""
        if head.duration_s is None:
            return
        start, end = head.started_at, head.started_at + head.duration_s
        if start > self._busy:
            yield from self._gap(start)
        self._busy = max(self._busy, end)
        self._away = "tools" if head.finish_reason is FinishReason.TOOL_CALLS else "agent"
        lane = next((n for n, free in enumerate(self._lane_ends) if free <= start), None)
        if lane is None:
            lane = len(self._lane_ends)
            self._lane_ends.append(end)
            yield _lane_name(self._pid, FIRST_CALL_LANE + lane, f"calls {lane + 1}")
        self._lane_ends[lane] = end
        args = {
            "turn": head.index,
            "status": head.status.value,
            "engine": _text(head.engine),
            "prompt_tokens": head.shared_tokens + head.new_tokens,
            "new_tokens": head.new_tokens,
            "sampled_tokens": head.sampled_tokens,
            "fork": None if head.fork_cause is None else head.fork_cause.value,
            "versions": [span.version for span in head.versions],
        }
        tid = FIRST_CALL_LANE + lane
        yield _span(self._pid, tid, f"sampling {head.index}", start, end, args)
        if head.first_token_s is not None:
            first = min(end, start + head.first_token_s)
            yield _span(self._pid, tid, "until the first token", start, first)

    def ending(self) -> Iterator[Event]:
        """What follows the last call."""
        if self._has_agent and self._agent_end > self._busy:
            yield from self._gap(self._agent_end)
        if self._verifier < self._end:
            args = {"reward": _value(self._line.get("reward"))}
            yield self._on_lane("verifier", self._verifier, self._end, args)

    def _gap(self, until: float) -> Iterator[Event]:
        until = min(until, self._agent_end)
        if until > self._busy:
            yield self._on_lane(self._away, self._busy, until)

    def _within(self, at: float) -> float:
        return min(max(at, self.start), self._end)

    def _on_lane(self, name: str, start: float, end: float, args: Event | None = None) -> Event:
        return _span(self._pid, TRIAL_LANE, name, start, end, args)


async def _lines(path: Path) -> AsyncIterator[Line]:
    at = 0
    while True:
        lines, end = await asyncio.to_thread(lines_after, path, at)
        for line in lines:
            yield line
        if end <= at:
            return
        at = end


def _process(pid: int, name: str, sort: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 1, "name": "process_name", "args": {"name": name}}
    args = {"sort_index": sort}
    yield {"ph": "M", "pid": pid, "tid": 1, "name": "process_sort_index", "args": args}


def _lane_name(pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _span(
    pid: int, tid: int, name: str, start: float, end: float, args: Event | None = None
) -> Event:
    ts = _us(start)
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": _us(end) - ts}
    return event if args is None else event | {"args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _end(line: Line, start: float) -> float:
    return start + max(0.0, _number(line.get("seconds")))


def _number(value: Any) -> float:
    """The number; 0 for anything else, which a foreign program may have written."""
    usable = isinstance(value, int | float) and abs(value) < 1e12  # False for NaN
    return float(value) if usable else 0.0


def _text(value: Any) -> str:
    return str(value)[:MAX_CHARS]


def _value(value: Any) -> float | str | None:
    """The value for `args`: JSON has no NaN, and a foreign program may have written a container."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _text(value)
    return value if isinstance(value, int) else None
