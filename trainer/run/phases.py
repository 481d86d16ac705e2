"""What the trainer did when: one line of `phases.jsonl` per phase (docs/publishing.md).

    {"step": 3, "phase": "training", "started_at": 1780000000.1, "seconds": 2.5}

Invariant: phases do not overlap; a line is written when its phase has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.run_files.lines import PhaseFields, line_of


@dataclass(frozen=True, slots=True)
class EndedPhase:
    """A phase that has ended. Example: EndedPhase(3, "training", 1.78e9, 2.5)"""

    step: int
    name: str
    started_at: float
    """Unix seconds."""
    seconds: float


class PhaseLog:
    """Example: phases.begin(3, "training"), and at its end phases.end() or the next begin."""

    def __init__(self, path: Path, ended: Callable[[EndedPhase], None] = lambda _: None) -> None:
        """`ended` is called with each phase that has ended."""
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._ended = ended
        self._running: tuple[int, str, float, float] | None = None
        """Step, name, and start by `time.time` and by `time.monotonic`."""

    def begin(self, step: int, name: str) -> None:
        """Ends the phase before."""
        self.end()
        self._running = (step, name, time.time(), time.monotonic())

    def end(self) -> None:
        """Ends the phase that runs, if any."""
        if self._running is None:
            return
        step, name, started_at, started = self._running
        self._running = None
        phase = EndedPhase(step, name, round(started_at, 6), round(time.monotonic() - started, 6))
        line: PhaseFields = {
            "step": step,
            "phase": name,
            "started_at": phase.started_at,
            "seconds": phase.seconds,
        }
        self._file.write(line_of(line))
        self._ended(phase)

    def close(self) -> None:
        self.end()
        self._file.close()
