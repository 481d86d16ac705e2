"""What a run leaves behind, and where: one folder, one layout.

    config.yaml        the resolved configuration, every key
    metrics.jsonl      one line per step: {"step": …, "time": …, "reward/mean": …, …}
    tensorboard/       the same for TensorBoard
    summary.json       eval.before.success, eval.after.success, wall_s, steps, …
    report.html        curves, evaluations, trials to read (also: agentic-train report RUN)
    checkpoints/       step-000010/, …
    buffer.sqlite      groups that wait to be trained on (mode `separate`)
    sessions.db        the recorded sessions (agentic-proxy sessions …)
    trials/            one folder per trial: the agent's log and working directory
    trials.jsonl       one line per finished trial
    logs/              the engines' and the proxy's output

Invariant: one run writes to a folder at a time (`run.lock`, released by the kernel when the process
dies), and every file but the logs is replaced whole or only appended to.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


class RunFolder:
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
        self.logs = path / "logs"
        self._lock: int | None = None

    @classmethod
    def create(cls, wanted: Path) -> RunFolder:
        """A new folder, locked: `wanted`, or where that is used, `wanted-2`, `wanted-3`, …"""
        number = 1
        path = wanted
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    number += 1
                    path = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ConfigError(
                f"trainer.run_dir={str(wanted)!r}: cannot be made ({error.strerror}); "
                "choose a folder that can be written"
            ) from error
        folder = cls(path)
        folder.lock()
        for sub in (folder.logs, folder.trials, folder.checkpoints):
            sub.mkdir()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run that exists, not locked.

        Raises:
            ConfigError: it is not the folder of a run.
        """
        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"{path}: is not a run's folder (it has no config.yaml)")
        return folder

    def lock(self) -> None:
        """
        Raises:
            ConfigError: another process is running here.
        """
        self._lock = os.open(self.path / "run.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path}: another process is running this run; end it"
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read_summary(self) -> dict[str, Any]:
        if not self.summary.is_file():
            return {}
        summary: dict[str, Any] = json.loads(self.summary.read_text())
        return summary

    def write_summary(self, values: Mapping[str, Any]) -> None:
        replace_file(self.summary, json.dumps(values, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all, also if the machine stops in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Each whole line; a last one that a kill cut short is not a line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def truncate_jsonl(path: Path, last_step: int) -> None:
    """Drops lines of later steps than `last_step`: a resumed run makes those steps again."""
    kept = [line for line in read_jsonl(path) if line.get("step", 0) <= last_step]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
