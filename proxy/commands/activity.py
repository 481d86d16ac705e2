"""What happens at a proxy at this moment, from what it sends to the page in the browser.

Invariant: memory is bounded: the last `KEPT` turns and events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxy.client import Happening

KEPT = 2000
RATE_S = 10.0
ACTIVE_S = 600.0
"""A session is shown for this long after its last call."""
RUNNING_S = 3600.0
"""A turn that has been open for longer was left by a proxy that died."""
ERRORS_S = 3600.0

Head = dict[str, Any]
"""A turn without its texts and tokens (`proxy/extras/view/summaries.py`)."""


@dataclass(slots=True)
class ActiveSession:
    """A session and its calls among the last ones of the proxy."""

    session_id: str
    last: Head
    at: float
    """When its last call began or ended, in Unix seconds."""
    calls: int = 0
    running: int = 0
    sampled_tokens: int = 0


class Activity:
    """Collects what happens. Call `take` with each `Happening`."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self._answered: deque[Head] = deque(maxlen=KEPT)
        self._running: dict[tuple[str, int], Head] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def take(self, happening: Happening) -> None:
        if happening.state is not None:
            self.state = happening.state
        news = happening.news or {"begun": [], "answered": [], "events": []}
        for head in news["begun"]:
            if head["status"] == "open":
                self._running[head["session"], head["index"]] = head
        for head in news["answered"]:
            self._running.pop((head["session"], head["index"]), None)
            self._answered.append(head)
        self._events.extend(news["events"])
        while len(self._running) > KEPT:
            del self._running[next(iter(self._running))]

    def running(self, now: float) -> list[Head]:
        """Turns without an answer, the oldest first."""
        heads = (h for h in self._running.values() if now - h["started_at"] < RUNNING_S)
        return sorted(heads, key=lambda head: float(head["started_at"]))

    def rates(self, now: float) -> tuple[float, float]:
        """Calls and sampled tokens per second, of the last `RATE_S`."""
        last = [head for head in self._answered if now - ended(head) < RATE_S]
        return len(last) / RATE_S, sum(head["sampled"] for head in last) / RATE_S

    def errors(self, now: float) -> list[dict[str, Any]]:
        """Calls that were refused in the last hour, the newest first."""
        refused = (e for e in self._events if e["kind"] == "refused" and now - e["at"] < ERRORS_S)
        return sorted(refused, key=lambda event: -float(event["at"]))

    def sessions(self, now: float) -> list[ActiveSession]:
        """Those at work, the one with the latest call first."""
        found: dict[str, ActiveSession] = {}
        for head in _at_work([*self._answered, *self.running(now)], now):
            at = ended(head)
            known = found.setdefault(head["session"], ActiveSession(head["session"], head, at))
            known.calls += 1
            known.running += head["status"] == "open"
            known.sampled_tokens += head["sampled"]
            if at >= known.at:
                known.last, known.at = head, at
        return sorted(found.values(), key=lambda session: -session.at)


def ended(head: Head) -> float:
    """When a turn ended, or began if it has not, in Unix seconds."""
    return float(head["started_at"] + (head["duration_s"] or 0.0))


def _at_work(heads: Iterable[Head], now: float) -> Iterable[Head]:
    return (head for head in heads if head["status"] == "open" or now - ended(head) <= ACTIVE_S)
