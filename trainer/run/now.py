"""What a run does at this moment: `now.json`, which the page shows in **Now** (docs/publishing.md).

    {"step": 3, "phase": "sampling", "started_at": 1780000000.1, "trials": 32, "ended": 17, …}

Invariant: the file is replaced whenever a phase begins or a trial ends, and removed with the run.
It is not synchronised to the disk, because no one needs it after the machine has stopped. If it
cannot be written, the run goes on without it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_loop.producers.protocol import Production
from agent_loop.records import Rollout, RolloutStatus
from proxy.http.valid_json import valid_text
from proxy.machine.secrecy import without_credentials

KEPT_ERRORS = 5
ERROR_CHARS = 300
_log = logging.getLogger(__name__)


class NowFile:
    """Example: now.begin(3, "sampling", trials=32); now.trial(rollout); now.close()"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.production: Callable[[], Production] | None = None
        """How far the next batch is; None if the producer does not report it."""
        self._now: dict[str, Any] = {}
        self._errors: list[dict[str, str]] = []
        self._failed = False

    def begin(self, step: int, phase: str, trials: int = 0) -> None:
        """`trials`: number of trials of the phase; 0 if it is not known."""
        self._now = {"step": step, "phase": phase, "started_at": time.time(), "trials": trials}
        self._now |= {"ended": 0, "failed": 0}
        self._write()

    def trial(self, rollout: Rollout) -> None:
        """A trial of the phase has ended."""
        if not self._now:
            return
        self._now["ended"] += 1
        if rollout.status is RolloutStatus.FAILED:
            self._now["failed"] += 1
            error = valid_text(without_credentials(rollout.error or "no cause is known"))
            trial_id = valid_text(rollout.trial_id)
            self._errors.append({"trial_id": trial_id, "error": error[:ERROR_CHARS]})
            self._errors = self._errors[-KEPT_ERRORS:]
        self._write()

    def close(self) -> None:
        with self._not_ending_the_run():
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        production = None if self.production is None else self.production()
        groups = None
        if production is not None:
            groups = {
                "ready": production.ready,
                "needed": production.needed,
                "running": production.running,
                "max_staleness": production.max_staleness,
            }
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        text = json.dumps({**self._now, "groups": groups, "errors": self._errors})
        with self._not_ending_the_run():
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)

    @contextmanager
    def _not_ending_the_run(self) -> Iterator[None]:
        """An error of the file is logged once: the run does not need the file."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                _log.warning("%s cannot be written, so Now is empty: %s", self._path, error)
            self._failed = True
