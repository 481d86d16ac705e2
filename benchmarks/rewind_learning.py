"""Trains one task with a sparse reward from prefixes, in trees, and in neither way.

    make bench-rewind                                   all of `ARMS` with the seeds 0, 1 and 2
    make bench-rewind ARGS="trees --seeds 0"            one run
    make bench-rewind ARGS="--table"                    no run, only the results of those in --out

The task is that of `benchmarks/rewind`. The runs follow one another; each is a complete
`agentic-train` with a real vLLM. It is stopped when two evaluations in a row have a success of at
least `GOAL`. A run that has reached the goal or the last step, or has failed, is not started again,
so that an interrupted benchmark goes on with the next run. Prints a Markdown table, and writes the
curves as an SVG file.

What is counted: the steps and the sampled tokens before the first of the two evaluations. Replayed
tokens are not sampled, and the tokens of evaluations are not counted. An evaluation is 32 walks
from the start, 8 through each house.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "benchmarks" / "rewind" / "agentic_trainer.yaml"
GOAL = 0.8
POLL_S = 5.0
WIDTH, HEIGHT, MARGIN = 900, 360, 50

ARMS: dict[str, list[str]] = {
    "neither": [],
    # With the default `low` of 0.1, hardly a group would begin with a prefix after the first steps.
    "prefix": ["rollout.prefix.low=0.4"],
    # A rollout of 6 turns and branches of 4 and 2: a group samples 4 * 12 turns, as 8 * 6 above.
    "trees": [
        "rollout.tree={every: 2, children: 1}",
        "rollout.group_size=4",
        "algorithm.advantage=tree",
    ],
}
"""Name → the settings that differ from `CONFIG`."""
DASHES = 'stroke-dasharray="6 4"'
COLOURS = {"neither": "#6e7781", "prefix": "#1f6feb", "trees": "#d1242f"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Example: Evaluation(step=8, tokens=36_000, success=0.25)"""

    step: int
    tokens: int
    """Tokens that were sampled for training up to this step."""
    success: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of a run, as far as it has come."""

    steps: int
    evaluations: tuple[Evaluation, ...]
    seconds: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The curve of the run in `folder`; an empty one if there is none."""
        file = folder / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        steps, tokens, seconds, found = 0, 0, 0.0, []
        for line in lines:
            if "rollout/sampled_tokens" in line:
                steps, tokens = line["step"], tokens + int(line["rollout/sampled_tokens"])
                seconds += line["time/step_s"]
            elif "eval/success" in line:
                found.append(Evaluation(line["step"], tokens, line["eval/success"]))
        return cls(steps, tuple(found), seconds)

    @property
    def goal(self) -> Evaluation | None:
        """The first of two evaluations in a row with the wanted success."""
        pairs = zip(self.evaluations, self.evaluations[1:], strict=False)
        reached = (a for a, b in pairs if min(a.success, b.success) >= GOAL)
        return next(reached, None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="*", help=f"of {', '.join(ARMS)}; default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="last step of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "rewind")
    parser.add_argument("--table", action="store_true", help="start no run")
    arguments = parser.parse_args(argv)
    arms = arguments.arms or list(ARMS)
    if unknown := set(arms) - set(ARMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(ARMS)}")
    runs = [(arm, seed) for seed in arguments.seeds for arm in arms]
    folders = {(arm, seed): arguments.out / f"{arm}-seed{seed}" for arm, seed in runs}
    if not arguments.table:
        for (arm, seed), folder in folders.items():
            train(arm, seed, arguments.steps, folder)
    curves = {run: Curve.read(folder) for run, folder in folders.items()}
    print("| arm | seed | success before | steps | sampled tokens | last | seconds |")
    print("|---|---|---|---|---|---|---|")
    for (arm, seed), curve in curves.items():
        if curve.evaluations:
            print(row(arm, seed, curve))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "success.svg").write_text(svg(curves))
    return 0


def train(arm: str, seed: int, steps: int, folder: Path) -> None:
    """Runs the training until it reaches the goal or its last step."""
    if is_over(Curve.read(folder), steps) or has_failed(folder):
        return
    command = [
        str(Path(sys.executable).with_name("agentic-train")),
        "--config",
        str(CONFIG),
        *ARMS[arm],
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.steps={steps}",
        f"trainer.run_dir={folder}",
        "logging.progress=plain",
    ]
    path = f"{ROOT}:{ROOT / 'benchmarks' / 'rewind'}"
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    stopping = False
    while process.poll() is None:
        if not stopping and Curve.read(folder).goal is not None:
            stopping = True
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    if not is_over(Curve.read(folder), steps) and not has_failed(folder):
        raise SystemExit(f"the run {folder} ended with exit code {process.returncode}")


def is_over(curve: Curve, steps: int) -> bool:
    return curve.goal is not None or curve.steps >= steps


def has_failed(folder: Path) -> bool:
    """Whether the run ended with an error: ten steps in a row had nothing to learn from."""
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text()).get("status") == "failed"


def row(arm: str, seed: int, curve: Curve) -> str:
    """The line of the table."""
    first, last, goal = curve.evaluations[0], curve.evaluations[-1], curve.goal
    reached = "not reached |" if goal is None else f"{goal.step} | {goal.tokens:,}"
    return (
        f"| {arm} | {seed} | {first.success:.3f} | {reached} "
        f"| {last.success:.3f} (step {last.step}, {last.tokens:,} tokens) | {curve.seconds:.0f} |"
    )


def svg(curves: Mapping[tuple[str, int], Curve]) -> str:
    """All curves as an image: success of the evaluations by sampled tokens."""
    most = max((e.tokens for curve in curves.values() for e in curve.evaluations), default=1) or 1
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN

    def place(tokens: float, success: float) -> str:
        x = MARGIN + tokens / most * (right - MARGIN)
        return f"{x:.1f},{bottom - success * (bottom - MARGIN):.1f}"

    lines = [
        f'<polyline points="{" ".join(place(e.tokens, e.success) for e in curve.evaluations)}" '
        f'fill="none" stroke="{COLOURS[arm]}" stroke-width="1.5"/>'
        for (arm, _), curve in curves.items()
    ]
    names = [
        f'<text x="{MARGIN + 20}" y="{MARGIN + 18 * number}" fill="{COLOURS[arm]}">{arm}</text>'
        for number, arm in enumerate(ARMS, 1)
    ]
    goal = f'<polyline points="{place(0, GOAL)} {place(most, GOAL)}" stroke="#999" {DASHES}/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="black"/>',
            goal,
            *lines,
            *names,
            f'<text x="{MARGIN}" y="{MARGIN - 10}">'
            f"success of the evaluations, from 0 to 1; dashed: {GOAL}</text>",
            f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{most:,} sampled tokens</text>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
