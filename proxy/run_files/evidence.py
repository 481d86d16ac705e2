"""What the files of a run say of how it is doing, read once and then only what was added.

    trials.jsonl    per step: trials, failures by cause, groups by whether their rewards differ
                    per evaluation: each task's share of successes
    metrics.jsonl   per step: mean reward, entropy, seconds of sampling, …

Invariant: the same files give the same evidence, whoever reads them and in how many pieces; of a
file that was replaced or cut, as by a run that was resumed, everything is read again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.run_files.causes import cause_of
from proxy.run_files.intervals import Difference, paired_difference
from proxy.run_files.json_lines import Line, lines_after

MAX_CAUSES = 50
"""Different causes that are counted one by one; the others together."""
OTHER_CAUSES = "other causes"
KEPT_METRICS = (
    *("reward/mean", "rollout/success", "rollout/trials", "rollout/failed"),
    *("rollout/uniform_groups", "group/with_signal", "signal/steps_without", "time/sample_s"),
    *("actor/entropy", "actor/entropy_before", "actor/grad_norm", "actor/policy_kl"),
    *("actor/clip_fraction", "sft/loss", "sft/held_out_loss", "rollout/sampled_tokens"),
)


@dataclass(slots=True)
class Failed:
    """Trials that failed for one cause."""

    trials: int = 0
    example: Line = field(default_factory=dict)
    """The line of the last of them."""


@dataclass(slots=True)
class StepTrials:
    """The trials that a step trained, or that failed before it could."""

    trials: int = 0
    judged: int = 0
    successes: int = 0
    truncated: int = 0
    """Judged trials that a limit ended."""
    reward_sum: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    """Failed trials."""
    _rewards: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Group → number of judged rollouts, the lowest and the highest reward."""

    @property
    def failed(self) -> int:
        return self.causes.total()

    def add(self, group: str, reward: float | None, *, success: bool) -> None:
        self.trials += 1
        if reward is None:
            return
        self.judged += 1
        self.successes += success
        self.reward_sum += reward
        count, low, high = self._rewards.get(group, (0, reward, reward))
        self._rewards[group] = count + 1, min(low, reward), max(high, reward)

    def groups(self, success_at: float) -> Groups:
        """The groups of at least two judged rollouts."""
        found = Groups()
        for count, low, high in self._rewards.values():
            if count < 2:
                continue
            found.all += 1
            if math.isclose(low, high, abs_tol=1e-9):
                found.solved += low >= success_at
                found.unsolved += low < success_at
        return found


@dataclass(slots=True)
class Groups:
    """Groups by their rewards. Example: Groups(all=8, solved=1, unsolved=5): two have a signal"""

    all: int = 0
    solved: int = 0
    """Every rollout succeeded."""
    unsolved: int = 0
    """Every rollout got the same reward, below a success."""

    def __add__(self, other: Groups) -> Groups:
        return Groups(
            self.all + other.all, self.solved + other.solved, self.unsolved + other.unsolved
        )


@dataclass(slots=True)
class Evaluated:
    """An evaluation of the policy on held-out tasks."""

    name: str
    step: int
    failed: int = 0
    tasks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task → number of judged trials, and of successes."""

    @property
    def shares(self) -> dict[str, float]:
        return {task: successes / judged for task, (judged, successes) in self.tasks.items()}


class Evidence:
    """Example: evidence.trial(line); evidence.metrics(line); evidence.steps[12].failed"""

    def __init__(self, success_at: float) -> None:
        self.success_at = success_at
        self.steps: defaultdict[int, StepTrials] = defaultdict(StepTrials)
        self.measures: defaultdict[int, dict[str, float]] = defaultdict(dict)
        """Step → its metrics of `KEPT_METRICS`."""
        self.failures: dict[str, Failed] = {}
        self.trials = 0
        """Number of all trials, those of evaluations included."""
        self.first: Evaluated | None = None
        self.last: Evaluated | None = None
        """The same as `first` while there is one evaluation."""
        self.sampled_tokens = 0
        self.low, self.high = math.inf, -math.inf
        """The lowest and the highest reward of any trial."""

    @property
    def difference(self) -> Difference | None:
        """Of the last evaluation and the first, paired by task; None if there are not two."""
        if self.first is None or self.last is None or self.first is self.last:
            return None
        return paired_difference(self.first.shares, self.last.shares)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Takes a line of `metrics.jsonl`."""
        step = line.get("step")
        if isinstance(step, int):
            found = {name: line[name] for name in KEPT_METRICS if is_finite(line.get(name))}
            if found:
                self.measures[step] |= found

    def trial(self, line: Mapping[str, Any]) -> None:
        """Takes a line of `trials.jsonl`."""
        status, step = line.get("status"), line.get("step")
        reward = line.get("reward")
        judged = status in ("done", "truncated") and is_finite(reward)
        value = float(reward) if judged and reward is not None else None
        self.trials += 1
        tokens = line.get("sampled_tokens")
        self.sampled_tokens += tokens if isinstance(tokens, int) else 0
        if value is not None:
            self.low, self.high = min(self.low, value), max(self.high, value)
        success = value is not None and value >= self.success_at
        cause = self._failed(line) if status == "failed" else ""
        if line.get("kind") in ("eval", None):
            self._evaluated(line, step if isinstance(step, int) else 0, value, success=success)
            return
        of_step = self.steps[step if isinstance(step, int) else 0]
        of_step.add(str(line.get("group") or line.get("task_id")), value, success=success)
        of_step.truncated += status == "truncated" and value is not None
        if cause:
            of_step.causes[cause] += 1

    def _failed(self, line: Mapping[str, Any]) -> str:
        error = line.get("error")
        cause = cause_of(error if isinstance(error, str) else None)
        if cause not in self.failures and len(self.failures) >= MAX_CAUSES:
            cause = OTHER_CAUSES
        failed = self.failures.setdefault(cause, Failed())
        failed.trials += 1
        failed.example = dict(line)
        return cause

    def _evaluated(
        self, line: Mapping[str, Any], step: int, reward: float | None, *, success: bool
    ) -> None:
        name = str(line.get("evaluation") or f"step {step}")
        if self.last is None or (self.last.name, self.last.step) != (name, step):
            self.last = Evaluated(name, step)
            self.first = self.first or self.last
        self.last.failed += line.get("status") == "failed"
        if reward is None:
            return
        task = "/".join(str(line.get(key) or "") for key in ("agent", "source", "task_id"))
        judged, successes = self.last.tasks.get(task, (0, 0))
        self.last.tasks[task] = judged + 1, successes + success


class RunRecord:
    """The evidence in a run's folder. Example: RunRecord(Path("runs/quickstart"), 1.0).read()"""

    def __init__(self, folder: Path, success_at: float) -> None:
        self.folder = folder
        self._success_at = success_at
        self._files = (folder / "trials.jsonl", folder / "metrics.jsonl")
        self._evidence = Evidence(success_at)
        self._read: dict[Path, tuple[int, int]] = {}
        """File → its inode, and the byte to go on from."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens of all trials that were read."""
        return self._evidence.sampled_tokens

    def read(self) -> Evidence:
        """The evidence up to the last whole line."""
        if any(self._is_another(path) for path in self._files):
            self._evidence, self._read = Evidence(self._success_at), {}
        for path, take in zip(
            self._files, (self._evidence.trial, self._evidence.metrics), strict=True
        ):
            inode, at = self._read.get(path, (_stat(path)[0], 0))
            while True:
                lines, end = lines_after(path, at)
                for line in lines:
                    take(line)
                if end <= at:
                    break
                at = end
            self._read[path] = inode, at
        return self._evidence

    def _is_another(self, path: Path) -> bool:
        """Whether the file is not the one, or not as long, as what was read of it."""
        if path not in self._read:
            return False
        (inode, at), (now, size) = self._read[path], _stat(path)
        return at > 0 and (now != inode or size < at)


LARGEST = 1e300
"""Rewards and metrics are less; an integer may be more than any float."""


def is_finite(value: Any) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -LARGEST < value < LARGEST


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_size
