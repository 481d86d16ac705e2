"""Trains each algorithm on the quickstart's task from the same starter model.

    python -m benchmarks.algorithms                     all of `VARIANTS`, seed 0
    python -m benchmarks.algorithms rloo gspo --seed 1

The runs follow one another; each is a complete `agentic-train` with a real vLLM. Prints a Markdown
table: held-out success before and after, mean training success by quarter of the run, number of
updates between sampling and training of a token (mean and largest), and wall seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "quickstart" / "algorithms.yaml"

VARIANTS: dict[str, list[str]] = {
    # A critic gives advantages also in groups with equal rewards, but must first be trained.
    "ppo": ["algorithm.preset=ppo"],
    "grpo": ["algorithm.preset=grpo"],
    "dr_grpo": ["algorithm.preset=dr_grpo"],
    "dapo": ["algorithm.preset=dapo"],
    "gspo": ["algorithm.preset=gspo"],
    "cispo": ["algorithm.preset=cispo"],
    "rloo": ["algorithm.preset=rloo"],
    "decoupled_ppo": [
        "algorithm.preset=decoupled_ppo",
        "trainer.mode=separate",
        "rollout.max_staleness=2",
        # The trials of three batches run at the same time, and rewards arrive two updates later.
        "rollout.concurrency=96",
        "remote_agent.grader.target=benchmarks.late_reward:grade",
    ],
}
"""Name → the settings that differ from `CONFIG`."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(VARIANTS)}; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - set(VARIANTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(VARIANTS)}")
    rows = [
        row(name, run(name, arguments.seed, arguments.steps))
        for name in arguments.names or VARIANTS
    ]
    print("| algorithm | before | after | training success by quarter | staleness | seconds |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


def run(name: str, seed: int, steps: int) -> Path:
    """Runs the training to its end, and returns the run's folder."""
    folder = ROOT / "runs" / "algorithms" / f"{name}-seed{seed}"
    subprocess.run(
        [
            str(Path(sys.executable).with_name("agentic-train")),
            "--config",
            str(CONFIG),
            *VARIANTS[name],
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            f"trainer.steps={steps}",
            f"trainer.run_dir={folder}",
            "logging.progress=plain",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'quickstart'}"},
        check=True,
    )
    return folder


def row(name: str, folder: Path) -> str:
    """The line of the table, read from the run's folder."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [line for line in lines if "rollout/success" in line]
    curve = [step["rollout/success"] for step in steps]
    staleness = f"{fmean(s['staleness/mean'] for s in steps):.2f}"
    oldest = max(step["staleness/max"] for step in steps)
    quarter = max(1, len(curve) // 4)
    means = [fmean(curve[i : i + quarter]) for i in range(0, quarter * 4, quarter)]
    before, after = (summary["eval"][when]["success"] for when in ("before", "after"))
    shown = " ".join(f"{mean:.2f}" for mean in means)
    return (
        f"| {name} | {before:.3f} | {after:.3f} | {shown} | {staleness} / {oldest:.0f} "
        f"| {summary['wall_s']:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
