"""What went wrong in a run, each kind with its number and an example."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_loop.records import RolloutStatus
from proxy.extras.view.bounded import cut
from proxy.machine.secrecy import without_credentials
from trainer.extras.report.series import SeenMetrics
from trainer.extras.report.trials import SeenTrials

EXAMPLE_CHARS = 500
MAX_WARNINGS = 60
LOG_BYTES = 8 * 2**20
"""The end of a log that is searched for errors."""
ERRORS = (b" ERROR ", b" CRITICAL ", b"Traceback (most recent call last)")
WARNINGS = (*ERRORS, b" WARNING ")
"""Engines warn of much that does not matter, so that only their errors are shown."""
_PROCESS = re.compile(rb"\(\w+ pid=(\d+)\) ")
_SHUTDOWN = b" [shutdown] "
"""vLLM writes it when it is stopped. Errors of the same process after that belong to its end."""


def troubles(
    run: Path,
    seen: SeenTrials,
    metrics: SeenMetrics,
    summary: Mapping[str, Any],
    max_staleness: float,
    *,
    lacks_signal: bool = True,
) -> list[dict[str, Any]]:
    """As JSON (`Report.troubles` of the page); empty if nothing did. `lacks_signal`: whether steps
    without a signal are among it."""
    found = [*_warnings(summary), *_trials(seen)]
    found += _steps(metrics, max_staleness, lacks_signal=lacks_signal)
    logs = sorted((run / "logs").glob("*.log")) if (run / "logs").is_dir() else []
    return [*found, *(each for path in logs[:50] for each in _errors(path))]


def _trouble(what: str, count: int, of: str = "", example: str = "") -> dict[str, Any]:
    """Errors may repeat what the configuration says, such as a URL with its password."""
    shown = cut(without_credentials(example), EXAMPLE_CHARS)
    return {"what": without_credentials(what), "count": count, "of": of, "example": shown}


def _warnings(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Why the run failed, and what it said on its terminal, such as engines that were started
    again."""
    error, said = summary.get("error"), summary.get("warnings")
    found = [_trouble("error ended the run", 1, "", error)] if isinstance(error, str) else []
    return found + [
        _trouble("warning" if count == 1 else "warnings", count, "", text)
        for text, count in list((said if isinstance(said, dict) else {}).items())[:MAX_WARNINGS]
        if isinstance(count, int)
    ]


def _trials(seen: SeenTrials) -> list[dict[str, Any]]:
    found = []
    causes = sorted(seen.causes.items(), key=lambda item: -item[1].count)
    for cause, failures in causes:
        example = f"{failures.example['trial_id']}: {failures.example['error'] or 'no error'}"
        of = f"of {seen.count} trials; they count neither in rewards nor in success"
        found.append(_trouble(f"failed trials: {cause}", failures.count, of, example))
    if count := seen.statuses[RolloutStatus.TRUNCATED]:
        of = f"of {seen.count} trials; a limit ended them, and they are judged as they were then"
        one = seen.truncated or {}
        example = f"{one.get('trial_id')}: {one.get('error') or 'no error'}"
        found.append(_trouble("truncated trials", count, of, example))
    if count := seen.statuses[RolloutStatus.ABORTED]:
        found.append(_trouble("aborted trials", count, f"of {seen.count} trials"))
    return found


def _steps(
    metrics: SeenMetrics, max_staleness: float, *, lacks_signal: bool
) -> list[dict[str, Any]]:
    found = []
    if metrics.without_signal and lacks_signal:
        of = (
            f"of {metrics.trained_steps} steps: the rewards that are compared were equal, so that "
            "every advantage was 0 and nothing was learnt"
        )
        example = f"step {metrics.first_without_signal}"
        found.append(_trouble("steps without a signal", metrics.without_signal, of, example))
    if metrics.stalest and metrics.stalest[1] > max_staleness:
        step, age = metrics.stalest
        of = f"more than rollout.max_staleness, {max_staleness:g}"
        found.append(_trouble("updates of staleness at most", int(age), of, f"step {step}"))
    return found


def _errors(path: Path) -> list[dict[str, Any]]:
    """The complaints at the end of a process's log: their number, and the last one."""
    count, last, stopping = 0, b"", set[bytes]()
    is_engine = path.name.startswith("engine")
    marks, what = (ERRORS, "errors") if is_engine else (WARNINGS, "warnings and errors")
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - LOG_BYTES)
            file.seek(start)
            while line := file.readline(2**16):
                process = _PROCESS.match(line)
                if process is not None and _SHUTDOWN in line:
                    stopping.add(process[1])
                if process is not None and process[1] in stopping:
                    continue
                if any(mark in line for mark in marks):
                    count, last = count + 1, line
    except OSError as error:
        return [_trouble(f"log that cannot be read: {path.name}", 1, "", str(error))]
    if not count:
        return []
    of = f"in the last {LOG_BYTES // 2**20} MB of the file" if start else ""
    return [_trouble(f"{what} in logs/{path.name}", count, of, last.decode(errors="replace"))]
