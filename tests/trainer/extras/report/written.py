"""Run folders written line by line, for reports of runs that did not happen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.extras.report import write_report
from trainer.run.folder import RunFolder


def trial(task: str, step: int, reward: float | None, **more: Any) -> dict[str, Any]:
    """A line of trials.jsonl: of the evaluation at this step, unless `more` says otherwise."""
    line = {"step": step, "kind": "eval", "evaluation": f"at {step}", "trial_id": f"{task}-{step}"}
    line |= {"task_id": task, "source": "", "status": "done", "reward": reward, "turns": 1}
    return line | more


def write_run(
    path: Path,
    *,
    trials: Iterable[Mapping[str, Any]] = (),
    metrics: Iterable[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.config.write_text(yaml.safe_dump(dict(config or {"model": {"path": "models/small"}})))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    folder.trials_log.write_text("".join(json.dumps(line) + "\n" for line in trials))
    folder.write_summary({"status": "done", **(summary or {})})
    return folder


def evaluation(step: int, success: float, low: float, high: float) -> dict[str, Any]:
    return {"step": step, "success": success, "interval": [low, high], "tasks": 8, "trials": 8}


def report_data(folder: RunFolder) -> dict[str, Any]:
    """What the report's script draws."""
    text = write_report(folder).page.read_text()
    found = re.search(r'<script type="application/json" id="report-data">([^<]*)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def report_text(folder: RunFolder) -> str:
    """The report's HTML before its data."""
    return (
        write_report(folder)
        .page.read_text()
        .partition('<div id="report">')[0]
        .partition("<body>")[2]
    )
