"""What a run's `trials.jsonl` says, read once: scores by task, failures by cause, examples.

Invariant: memory grows with the number of different tasks, not with the number of trials.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_loop.records import RolloutStatus
from proxy.extras.view.run_answers import EvaluationJson
from proxy.extras.view.run_folder import trial_fields
from proxy.machine.secrecy import without_credentials
from proxy.run_files.causes import cause_of
from proxy.run_files.intervals import Difference, paired_difference, wilson_interval
from proxy.run_files.json_lines import every_line
from trainer.extras.report.series import is_number

MAX_CAUSES = 20
"""Different causes of failed trials that are counted one by one; the others together."""

Trial = dict[str, Any]
"""A line of trials.jsonl as `trial_fields` returns it, with texts and numbers where they belong."""


@dataclass(slots=True)
class TaskTrials:
    """The judged trials of one task in one evaluation."""

    judged: int = 0
    successes: int = 0
    best: Trial = field(default_factory=dict)
    worst: Trial = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.successes / self.judged

    def add(self, trial: Trial, *, success: bool) -> None:
        self.judged += 1
        self.successes += success
        if not self.best or trial["reward"] > self.best["reward"]:
            self.best = trial
        if not self.worst or trial["reward"] < self.worst["reward"]:
            self.worst = trial


@dataclass(slots=True)
class Evaluated:
    """The trials of one evaluation by task."""

    name: str
    step: int
    tasks: dict[str, TaskTrials] = field(default_factory=dict)

    def score(self) -> EvaluationJson:
        """Success with its interval, as in the summary of a run."""
        shares = [trials.share for trials in self.tasks.values()]
        success = sum(shares) / len(shares) if shares else math.nan
        return {
            "name": self.name,
            "step": self.step,
            "success": success,
            "tasks": len(shares),
            "trials": sum(each.judged for each in self.tasks.values()),
            "interval": wilson_interval(success, len(shares)),
        }


@dataclass(slots=True)
class Failures:
    """Trials that failed for one cause."""

    count: int
    example: Trial


class SeenTrials:
    """Example: SeenTrials(Path("runs/quickstart/trials.jsonl"), success_at=1.0).difference"""

    def __init__(self, path: Path, *, success_at: float) -> None:
        self._success_at = success_at
        self.statuses: Counter[str] = Counter()
        self.causes: dict[str, Failures] = {}
        self.truncated: Trial | None = None
        """One of those that were truncated."""
        self.trained_tasks: set[int] = set()
        """A hash of each."""
        self.last_trained_step: int | None = None
        self.first: Evaluated | None = None
        self.last: Evaluated | None = None
        """The same as `first` while there is one evaluation."""
        for line in every_line(path):
            self._add(clean(trial_fields(line)))

    @property
    def count(self) -> int:
        return self.statuses.total()

    @property
    def difference(self) -> Difference | None:
        """Of the last evaluation and the first, paired by task; None if there are not two."""
        if self.first is None or self.last is None or self.first is self.last:
            return None
        shares = [
            {name: trials.share for name, trials in each.tasks.items()}
            for each in (self.first, self.last)
        ]
        return paired_difference(*shares)

    def _add(self, trial: Trial) -> None:
        self.statuses[trial["status"]] += 1
        if trial["status"] == RolloutStatus.FAILED:
            self._add_failed(trial)
        if trial["status"] == RolloutStatus.TRUNCATED and self.truncated is None:
            self.truncated = trial
        task = "/".join((trial["agent"], trial["source"], trial["task_id"]))
        if trial["kind"] not in ("eval", ""):  # `agentic-train eval` writes no kind
            self.trained_tasks.add(hash(task))
            self.last_trained_step = trial["step"]
            return
        name = trial["evaluation"] or f"step {trial['step']}"
        if self.first is None:
            self.first = self.last = Evaluated(name, trial["step"])
        elif self.last is None or (self.last.name, self.last.step) != (name, trial["step"]):
            self.last = Evaluated(name, trial["step"])
        counts = trial["status"] in (RolloutStatus.DONE, RolloutStatus.TRUNCATED)
        if self.last is not None and counts and trial["reward"] is not None:
            success = trial["reward"] >= self._success_at
            self.last.tasks.setdefault(task, TaskTrials()).add(trial, success=success)

    def _add_failed(self, trial: Trial) -> None:
        cause = cause_of(trial["error"])
        if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
            cause = "other causes"
        self.causes.setdefault(cause, Failures(0, trial)).count += 1


def clean(line: Mapping[str, Any]) -> Trial:
    """With the types that the page and this package expect, whoever wrote the file, and
    without the credentials that an error may repeat."""
    trial = dict(line)
    for name in ("kind", "trial_id", "task_id", "source", "agent", "status", "evaluation"):
        trial[name] = trial[name] if isinstance(trial[name], str) else ""
    for name in ("step", "turns", "sampled_tokens"):
        trial[name] = int(trial[name]) if is_number(trial[name]) else 0
    for name in ("reward", "seconds"):
        trial[name] = float(trial[name]) if is_number(trial[name]) else None
    error = trial["error"]
    trial["error"] = without_credentials(error) if isinstance(error, str) else None
    return trial
