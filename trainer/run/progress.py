"""Shows a run's progress: a live line in a terminal, or plain lines elsewhere.

[ 2:39] step  4/24 sampling: 17 of 32 trials, success 53 %, 117 tokens/s, 3:10 left
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from proxy.run_files.formats import percent

SHOWN: tuple[tuple[str, str, str | Callable[[float], str]], ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("rollout/success", "success", percent),
    ("mismatch/logp_abs_mean", "mismatch", "{:.1e}"),
    ("staleness/mean", "staleness", "{:.2f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("sft/held_out_loss", "held-out loss", "{:.4f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("time/step_s", "s/step", "{:.1f}"),
)
"""The columns of a step's line: metric, short name, format or what formats it."""

REFRESH_PER_S = 2.0
"""Often enough for a clock that shows seconds; each refresh takes about a millisecond."""
WARNING = "warning: "
"""How a line begins that the report of the run repeats."""
RECENT_STEPS = 5
"""Number of steps whose mean duration predicts the time left; steps become faster or slower as the
policy learns to give shorter or longer answers."""


@dataclass(slots=True)
class Phase:
    """What the run is doing, and the trials that have ended meanwhile.

    Example: Phase(4, "sampling", trials=32)
    """

    step: int
    name: str
    trials: int = 0
    """Number of trials of the phase; 0 if it is not known."""
    started: float = field(default_factory=lambda: time.monotonic())
    ended: int = 0
    successes: int = 0
    tokens: int = 0

    def describe(self) -> str:
        if not self.trials and not self.ended:
            return f"{self.name} …"
        of_all = f" of {self.trials}" if self.trials else ""
        parts = [f"{self.name}: {self.ended}{of_all} trials"]
        if self.ended:
            seconds = max(time.monotonic() - self.started, 1e-3)
            parts.append(f"success {percent(self.successes / self.ended)}")
            parts.append(f"{self.tokens / seconds:,.0f} tokens/s")
        return ", ".join(parts)


class Progress:
    """`mode` is `logging.progress`, `steps` the number of steps of the run. `warned` is called with
    each warning that is shown."""

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain", "none"],
        steps: int,
        warned: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._steps = steps
        self._warned = warned
        self._started = time.monotonic()
        self._silent = mode == "none"
        self._phase = Phase(0, "starting")
        self._step_ends: list[float] = []
        live = mode == "rich" or (mode == "auto" and sys.stdout.isatty())
        self._console = _Console(
            highlight=False, soft_wrap=True, force_terminal=True if mode == "rich" else None
        )
        self._live: Live | None = None
        if live:
            self._live = Live(
                console=self._console,
                get_renderable=self.line,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )
            self._live.start()

    def phase(self, step: int, name: str, trials: int = 0) -> None:
        """Shows what the run is doing in the live line; plain lines show whole steps only."""
        self._phase = Phase(step, name, trials)

    def trial(self, *, success: bool, tokens: int) -> None:
        """A trial of the current phase has ended."""
        self._phase.ended += 1
        self._phase.successes += success
        self._phase.tokens += tokens

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step_ends.append(time.monotonic())
        shown = [
            f"{label} {form(metrics[name]) if callable(form) else form.format(metrics[name])}"
            for name, label, form in SHOWN
            if name in metrics
        ]
        shown += [left] if (left := self._time_left(step)) else []
        self.say(f"{self._place(step)} " + "  ".join(shown))

    def say(self, text: str) -> None:
        if text.startswith(WARNING):
            self._warned(text.removeprefix(WARNING))
        if self._silent:
            return
        try:
            self._console.print(text, markup=False)
        except OSError:  # the terminal or the reader has gone: the run goes on, or saves and ends
            self._silent = True
            _discard_output()

    def close(self) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def line(self) -> Text:
        """The live line, as it is now."""
        phase = self._phase
        left = self._time_left(phase.step - 1)
        return Text(
            f"{self._place(phase.step)} {phase.describe()}" + (f", {left}" if left else ""),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _time_left(self, steps_done: int) -> str:
        """How long the other steps will take; empty until two steps have ended."""
        recent = self._step_ends[-RECENT_STEPS - 1 :]
        steps_left = self._steps - steps_done
        if len(recent) < 2 or steps_left <= 0:
            return ""
        each_s = (recent[-1] - recent[0]) / (len(recent) - 1)
        since_s = time.monotonic() - recent[-1]
        return f"{_clock(max(0.0, steps_left * each_s - since_s))} left"

    def _place(self, step: int) -> str:
        width = len(str(self._steps))
        elapsed = _clock(time.monotonic() - self._started)
        return f"[{elapsed:>6}] step {step:>{width}}/{self._steps}"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise


def _discard_output() -> None:
    """What is still buffered for standard output would be an error at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _clock(seconds: float) -> str:
    """Example: _clock(3725) == "1:02:05"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
