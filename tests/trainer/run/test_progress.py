"""The progress of a run, as a terminal or a file shows it."""

from __future__ import annotations

import os
import sys

import pytest

from trainer.run import progress as module
from trainer.run.progress import Progress


class Clock:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_plain_progress_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("plain", steps=20)
    progress.phase(3, "sampling", 8)
    progress.trial(success=True, tokens=10)
    progress.step(3, {"reward/mean": 0.25, "mismatch/logp_abs_mean": 4e-7, "other": 1.0})
    progress.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert "step  3/20" in line
    assert "reward 0.250" in line
    assert "mismatch 4.0e-07" in line


def test_live_line_counts_trials_success_tokens_and_the_time_left(clock: Clock) -> None:
    progress = Progress("none", steps=20)
    for step in (1, 2):
        clock.now += 30.0
        progress.step(step, {})
    progress.phase(3, "sampling", 8)
    clock.now += 4.0
    for success in (True, False):
        progress.trial(success=success, tokens=100)
    assert str(progress.line()) == (
        "[  1:04] step  3/20 sampling: 2 of 8 trials, success 50 %, 50 tokens/s, 8:56 left"
    )


def test_live_line_of_a_phase_without_trials_names_the_phase(clock: Clock) -> None:
    progress = Progress("none", steps=20)
    progress.phase(1, "training")
    assert str(progress.line()) == "[  0:00] step  1/20 training …"


def test_time_left_follows_the_recent_steps(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("plain", steps=1000)
    for step, seconds in enumerate([600.0, *[10.0] * 6], start=1):
        clock.now += seconds
        progress.step(step, {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("2:45:30 left")


def test_terminal_shows_the_line_between_the_printed_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress("rich", steps=20)
    progress.phase(3, "sampling", 8)
    progress.say("a line")
    progress.close()
    shown = capsys.readouterr().out
    assert "a line" in shown
    assert "sampling: 0 of 8 trials" in shown


def test_progress_none_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("none", steps=1)
    progress.step(1, {"reward/mean": 1.0})
    assert capsys.readouterr().out == ""


def test_run_goes_on_without_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal was closed, or `tee` has ended: a write fails."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        progress = Progress("plain", steps=2)
        progress.say("one")
        progress.say("two")
        progress.close()
