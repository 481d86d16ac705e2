"""The folder of a run, which holds everything that the run writes.

    config.yaml        the resolved configuration, every key
    metrics.jsonl      one line per step: {"step": …, "time": …, "reward/mean": …, …}
    tensorboard/       the same for TensorBoard
    summary.json       status, verdict, eval.before.success, eval.after.success, wall_s, steps, …
    report.html        curves, evaluations, trials (also: agentic-train report RUN)
    checkpoints/       step-000010/, …
    buffer.sqlite      groups that wait to be trained (mode `separate`)
    sessions.db        the recorded sessions (agentic-proxy sessions …)
    trials/            one folder per trial: the agent's log and working directory
    trials.jsonl       one line per finished trial
    now.json           the phase, its trials and the groups that are ready; removed at the end
    phases.jsonl       one line per phase of the trainer: sampling, training, saving, …
    tokens/            step-000010/, …: advantages and log-probabilities of the trained tokens
    ledger.jsonl       with trainer.deterministic: one line per step, in a chain of hashes
    batches/           with trainer.deterministic: step-000001, …: the groups that were trained
    run.id             the name of the run, to which the policies belong that it publishes
    logs/              the engines' and the proxy's output

Invariant: one process at a time writes to the folder (`run.lock`, which the kernel releases when
the process dies). Every file except the logs is either replaced atomically or appended to.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import shortuuid

from proxy.machine.file_lock import is_locked
from proxy.run_files.files import replace_file
from trainer.errors import ConfigError


class RunFolder:
    """Example: RunFolder.create(Path("runs/quickstart")).metrics"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.buffer = path / "buffer.sqlite"
        self.sessions = path / "sessions.db"
        self.trials = path / "trials"
        self.trials_log = path / "trials.jsonl"
        self.now = path / "now.json"
        self.phases = path / "phases.jsonl"
        self.tokens = path / "tokens"
        self.ledger = path / "ledger.jsonl"
        self.batches = path / "batches"
        self.logs = path / "logs"
        self._lock: int | None = None

    @classmethod
    def create(cls, wanted: Path) -> RunFolder:
        """Creates and locks a new folder: `wanted`, or `wanted-2`, `wanted-3`, … if it exists.

        Raises:
            ConfigError: the folder cannot be made.
        """
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            for path in _candidates(wanted):
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    break
        except OSError as error:
            raise ConfigError(
                f"trainer.run_dir={str(wanted)!r}: cannot be created ({error.strerror}); "
                "choose a folder that is writable"
            ) from error
        folder = cls(path)
        folder.lock()
        for sub in (folder.logs, folder.trials, folder.checkpoints):
            sub.mkdir()
        return folder

    @classmethod
    def latest(cls, wanted: Path) -> RunFolder | None:
        """The newest run among `wanted`, `wanted-2`, …; None if there is none."""
        existing = list(itertools.takewhile(Path.exists, _candidates(wanted)))
        runs = [cls(path) for path in existing if (path / "config.yaml").is_file()]
        return runs[-1] if runs else None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run; it is not locked.

        Raises:
            ConfigError: it is not the folder of a run.
        """
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"{path}: is not a run's folder: it has no config.yaml")
        return folder

    def lock(self) -> None:
        """Locks the run for this process, until the process ends or calls `unlock`.

        Raises:
            ConfigError: another process holds the lock, or the file system has no locks.
        """
        file = os.open(self.path / "run.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise ConfigError(
                f"{self.path}: another process is running this run; end it, or choose another "
                "trainer.run_dir"
            ) from error
        except OSError as error:  # NFS without its lock service
            os.close(file)
            raise ConfigError(
                f"{self.path}: this file system gives no lock ({error.strerror}), and two trainers "
                "could write to one run; mount it with locks (for NFS: version 4), or choose a "
                "trainer.run_dir on another disk"
            ) from error
        self._lock = file

    @property
    def run_id(self) -> str:
        """The name of the run among all runs, by which a proxy knows it again after it was
        resumed.

        Raises:
            ConfigError: the file is empty.
        """
        file = self.path / "run.id"
        if not file.exists():
            replace_file(file, f"{self.path.name}-{shortuuid.random(8)}")
        if not (name := file.read_text(encoding="utf-8").strip()):
            raise ConfigError(
                f"{file}: is empty, so that the policies of this run are not known; write the "
                "run's name to it (the proxy's answer 409 has it), or delete it to get a new one"
            )
        return name

    @property
    def is_running(self) -> bool:
        """Whether a process, this one or another, holds the lock; the kernel releases it when the
        process dies."""
        return self._lock is not None or is_locked(self.path / "run.lock")

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read_summary(self) -> dict[str, Any]:
        """`summary.json`, with the status `killed` for a run that wrote `running` and has died."""
        if not self.summary.is_file():
            return {}
        summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        if summary.get("status") == "running" and not self.is_running:
            summary["status"] = "killed"
        return summary

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """A number that is not finite, such as the success of no trial, is null: JSON has none."""
        text = json.dumps(_finite(values), indent=2, allow_nan=False)
        replace_file(self.summary, text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")
