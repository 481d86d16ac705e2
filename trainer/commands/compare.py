"""`agentic-train compare DIR DIR …`: evaluations side by side, each compared with the first.

A run's folder stands for its last evaluation; alone, for its first and its last one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from agent_loop.producers.trial_list import TrialLine, read_lines
from proxy.run_files.evidence import RunRecord
from proxy.run_files.intervals import paired_difference
from trainer.commands.eval import aligned
from trainer.commands.runs import reporting
from trainer.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train compare`; returns its exit code."""
    return reporting("agentic-train compare", lambda: _compare(arguments.folders))


def _compare(folders: Sequence[Path]) -> int:
    several = len(folders) > 1
    found = [each for folder in folders for each in _evaluations(folder)[-1 if several else 0 :]]
    first = found[0][1]
    rows = [["evaluation", "tasks", "success", "difference [95 %]", "better", "worse"]]
    for name, share in found:
        mean = sum(share.values()) / len(share)
        difference = paired_difference(first, share)
        low, high = difference.interval
        compared = [f"{difference.mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        compared += [str(difference.better), str(difference.worse)]
        if share is first:
            compared = ["", "", ""]
        elif not difference.tasks:
            compared = ["no task in common", "", ""]
        rows.append([name, str(len(share)), f"{mean:.3f}", *compared])
    print(aligned(rows))
    return 0


def _evaluations(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """Name → task → the share of its judged trials that succeeded; two of a run that made several.

    Raises:
        ConfigError: the folder has no judged trial of an evaluation.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: no evaluation and no run; give the --out of agentic-train eval"
        )
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    success_at = float(settings.get("eval", {}).get("success_at", 1.0))
    try:
        found = [(str(folder), _shares(read_lines(folder / "trials.jsonl"), success_at))]
    except (TypeError, ValueError):  # a run's lines have other fields
        evidence = RunRecord(folder, success_at).read()
        first, last = evidence.first, evidence.last
        made = [first] if first is last else [first, last]
        found = [(f"{folder} ({each.name})", each.shares) for each in made if each is not None]
    if judged := [each for each in found if each[1]]:
        return judged
    raise ConfigError(
        f"{folder}: has no finished trial on held-out tasks; give the --out of agentic-train eval, "
        "or a run with data.val_files"
    )


def _shares(lines: Sequence[TrialLine], success_at: float) -> dict[str, float]:
    judged: dict[str, list[bool]] = {}
    for line in lines:
        if line.judged:
            success = line.reward is not None and line.reward >= success_at
            judged.setdefault("/".join(line.key[:3]), []).append(success)
    return {task: sum(each) / len(each) for task, each in judged.items()}
