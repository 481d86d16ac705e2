"""`agentic-train compare DIR DIR …`: evaluations side by side, each compared with the first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from agent_loop.producers.trial_list import TrialLine, read_lines
from proxy.run_files.intervals import paired_difference
from trainer.commands.eval import aligned
from trainer.commands.runs import reporting
from trainer.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train compare`; returns its exit code."""
    return reporting("agentic-train compare", lambda: _compare(arguments.folders))


def _compare(folders: Sequence[Path]) -> int:
    shares = [_shares(folder) for folder in folders]
    rows = [["evaluation", "tasks", "success", "difference [95 %]", "better", "worse"]]
    for folder, share in zip(folders, shares, strict=True):
        mean = sum(share.values()) / len(share)
        difference = paired_difference(shares[0], share)
        low, high = difference.interval
        compared = [f"{difference.mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        compared += [str(difference.better), str(difference.worse)]
        if share is shares[0]:
            compared = ["", "", ""]
        elif not difference.tasks:
            compared = ["no task in common", "", ""]
        rows.append([str(folder), str(len(share)), f"{mean:.3f}", *compared])
    print(aligned(rows))
    return 0


def _shares(folder: Path) -> dict[str, float]:
    """Task → the share of its judged trials that succeeded.

    Raises:
        ConfigError: the folder has no judged trial, or those of a run.
    """
    judged: dict[str, list[TrialLine]] = {}
    try:
        found = read_lines(folder / "trials.jsonl")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: its trials are not those of an evaluation; give the --out of agentic-train"
            " eval (the evaluations of a training run are in its report)"
        ) from error
    for line in found:
        if line.judged:
            judged.setdefault("/".join(line.key[:3]), []).append(line)
    if not judged:
        raise ConfigError(f"{folder}: has no finished trial; give the --out of agentic-train eval")
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    success_at: float = settings["eval"]["success_at"]
    return {
        task: sum(line.reward is not None and line.reward >= success_at for line in lines)
        / len(lines)
        for task, lines in judged.items()
    }
