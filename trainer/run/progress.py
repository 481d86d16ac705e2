"""Shows a run's progress: a live line in a terminal, or plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Literal

from rich.console import Console
from rich.status import Status

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("rollout/success", "success", "{:.2f}"),
    ("mismatch/logp_abs_mean", "mismatch", "{:.1e}"),
    ("staleness/mean", "staleness", "{:.2f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("time/step_s", "s/step", "{:.1f}"),
)
"""The columns of a step's line: metric, short name, format."""


class Progress:
    """`mode` is `logging.progress`, `steps` the number of steps of the run."""

    def __init__(self, mode: Literal["auto", "rich", "plain", "none"], steps: int) -> None:
        self._steps = steps
        self._started = time.monotonic()
        self._silent = mode == "none"
        live = mode == "rich" or (mode == "auto" and sys.stdout.isatty())
        self._console = Console(
            highlight=False, soft_wrap=True, force_terminal=True if mode == "rich" else None
        )
        self._status: Status | None = self._console.status("") if live else None
        if self._status:
            self._status.start()

    def phase(self, step: int, phase: str) -> None:
        """Shows what the run is doing in the live display; plain lines show whole steps only."""
        if self._status:
            self._status.update(f"{self._place(step)} {phase} …")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [
            f"{label} {form.format(metrics[name])}"
            for name, label, form in SHOWN
            if name in metrics
        ]
        self.say(f"{self._place(step)} " + "  ".join(shown))

    def say(self, text: str) -> None:
        if not self._silent:
            self._console.print(text, markup=False)

    def close(self) -> None:
        if self._status:
            self._status.stop()
            self._status = None

    def _place(self, step: int) -> str:
        seconds = int(time.monotonic() - self._started)
        width = len(str(self._steps))
        return f"[{seconds // 60:3d}:{seconds % 60:02d}] step {step:>{width}}/{self._steps}"
