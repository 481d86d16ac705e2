"""`agentic-train status RUN`: how a run is doing, from its folder; also of one that goes on.

The exit code is 0 for every verdict; a script reads `verdict` of `--json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from proxy.machine.secrecy import flat_config
from proxy.run_files.evidence import RunRecord
from proxy.run_files.formats import duration
from proxy.run_files.verdict import RunVerdict, VerdictJson, verdict_lines
from trainer.commands.runs import reporting
from trainer.run.folder import RunFolder


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train status`; returns its exit code."""
    return reporting("agentic-train status", lambda: _status(arguments.run, arguments.json))


def _status(path: Path, as_json: bool) -> int:
    folder = RunFolder.open(path)
    summary = folder.read_summary()
    config = dict(flat_config(yaml.safe_load(folder.config.read_text(encoding="utf-8")) or {}))
    verdict = judged(folder, summary, config)
    steps, wanted = summary.get("steps", 0), config.get("trainer.steps")
    if as_json:
        names = ("status", "steps", "wall_s", "machine", "error")
        found = {name: summary[name] for name in names if name in summary}
        run = {"run": str(path), "steps_wanted": wanted and json.loads(wanted)}
        print(json.dumps(run | found | {"verdict": verdict}, indent=2, allow_nan=False))
        return 0
    of = f" of {wanted}" if wanted else ""
    took = f", {duration(summary['wall_s'])}" if "wall_s" in summary else ""
    print(f"{path}: {summary.get('status', 'no status')}, step {steps}{of}{took}")
    print("\n".join(verdict_lines(verdict)))
    return 0


def judged(
    folder: RunFolder, summary: dict[str, Any], config: dict[str, str], now: float | None = None
) -> VerdictJson:
    """The verdict of the run in the folder, at the time `now` (None: this moment)."""
    success_at = float(json.loads(config.get("eval.success_at", "1.0")))
    evidence = RunRecord(folder.path, success_at).read()
    at_work = {}
    if summary.get("status") == "running" and folder.now.is_file():
        at_work = json.loads(folder.now.read_text(encoding="utf-8"))
    return RunVerdict(folder.path, evidence, summary, config, now=at_work, at=now).json()
