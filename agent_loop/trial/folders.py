"""Removes the folders of finished trials, however an agent has filled them, so that a long run
needs bounded space.

Invariant: the folder of a running trial is never removed, and of the finished ones the oldest go
first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from agent_loop.launchers.left_files import remove_folder
from agent_loop.processes.supervisor import disk_bytes
from proxy.config import RetentionConfig


class FinishedTrials:
    """The folders of the trials that have ended. Its methods run in threads, one at a time.

    Example: FinishedTrials(Path("run/trials"), RetentionConfig(max_bytes=10 << 30)).add("sum-1-x")
    """

    def __init__(
        self, folder: Path, keep: RetentionConfig, now: Callable[[], float] = time.time
    ) -> None:
        """What is in the folder already is of trials that have ended: this run is a continued
        one."""
        self._folder = folder
        self._keep = keep
        self._now = now
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[float, int]] = {}
        """Name → when it ended (Unix seconds), and its bytes; oldest first."""
        if self.is_limited and folder.is_dir():
            found = sorted((path.stat().st_mtime, path.name) for path in folder.iterdir())
            self._ended = {name: (at, disk_bytes(str(folder / name))) for at, name in found}

    @property
    def is_limited(self) -> bool:
        return self._keep.completed_s is not None or self._keep.max_bytes is not None

    def add(self, name: str) -> None:
        """A trial has ended; removes the folders that are too many or too old now."""
        if not self.is_limited:
            return
        with self._lock:
            self._ended[name] = (self._now(), disk_bytes(str(self._folder / name)))
            total = sum(size for _, size in self._ended.values())
            for old, (at, size) in list(self._ended.items()):
                if not self._is_over(at, total):
                    break
                remove_folder(self._folder / old)
                del self._ended[old]
                total -= size

    def _is_over(self, ended_at: float, total_bytes: int) -> bool:
        keep = self._keep
        is_old = keep.completed_s is not None and ended_at < self._now() - keep.completed_s
        return is_old or (keep.max_bytes is not None and total_bytes > keep.max_bytes)
