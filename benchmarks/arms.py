"""Runs that differ by a few settings, each with several seeds: how benchmarks compare learning.

The runs follow one another; each is a complete `agentic-train` with a real vLLM. It is stopped when
two evaluations in a row have a success of at least `Study.goal`. A run that has reached the goal or
the last step, or has failed, is not started again, so that an interrupted benchmark goes on with
the next run. Prints a Markdown table, and writes the curves as an SVG file.

What is counted: the steps and the sampled tokens before the first of the two evaluations. Replayed
tokens are not sampled, and the tokens of evaluations are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 5.0
WIDTH, HEIGHT, MARGIN = 900, 360, 50
DASHES = 'stroke-dasharray="6 4"'
COLOURS = ("#6e7781", "#1f6feb", "#d1242f")


@dataclass(frozen=True, slots=True)
class Study:
    """Example: Study("compaction", {"trained": [], "no_limit": ["rollout.group_size=4"]})"""

    name: str
    """The module or folder in `benchmarks`, and the folder in `runs`."""
    arms: Mapping[str, Sequence[str]]
    """Name → the settings that differ from the task's `agentic_trainer.yaml`; at most three."""
    goal: float | None = 0.8
    """Success at which a run is stopped. None: each run goes on to its last step."""
    steps: int = 60
    quickstart: bool = False
    """Whether the task is that of the quickstart, and not one of its own."""

    @property
    def folder(self) -> Path:
        """Whose modules the task's parts import."""
        if self.quickstart:
            return ROOT / "examples" / "quickstart"
        return ROOT / "benchmarks" / self.name

    @property
    def config(self) -> Path:
        return (ROOT if self.quickstart else self.folder) / "agentic_trainer.yaml"


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
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if file.exists()
            else []
        )
        steps, tokens, seconds, found = 0, 0, 0.0, []
        for line in lines:
            if "rollout/sampled_tokens" in line:
                steps, tokens = line["step"], tokens + int(line["rollout/sampled_tokens"])
                seconds += line["time/step_s"]
            elif "eval/success" in line:
                found.append(Evaluation(line["step"], tokens, line["eval/success"]))
        return cls(steps, tuple(found), seconds)

    def reached(self, goal: float | None) -> Evaluation | None:
        """The first of two evaluations in a row, after different steps, with the wanted success."""
        pairs = zip(self.evaluations, self.evaluations[1:], strict=False)
        if goal is None:
            return None
        return next((a for a, b in pairs if min(a.success, b.success) >= goal), None)


def main(study: Study, doc: str | None, argv: list[str] | None = None) -> int:
    """The command of a benchmark; `doc` is its help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{study.name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arms", nargs="*", help=f"of {', '.join(study.arms)}; default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=study.steps, help="last step of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / study.name)
    parser.add_argument("--table", action="store_true", help="start no run")
    arguments = parser.parse_args(argv)
    arms = arguments.arms or list(study.arms)
    if unknown := set(arms) - set(study.arms):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(study.arms)}")
    runs = [(arm, seed) for seed in arguments.seeds for arm in arms]
    folders = {(arm, seed): arguments.out / f"{arm}-seed{seed}" for arm, seed in runs}
    if not arguments.table:
        for (arm, seed), folder in folders.items():
            train(study, arm, seed, arguments.steps, folder)
    curves = {run: Curve.read(folder) for run, folder in folders.items()}
    print("| | seed | evaluations | to the goal: steps | sampled tokens | seconds |")
    print("|---|---|---|---|---|---|")
    for (arm, seed), curve in curves.items():
        if curve.evaluations:
            print(row(study, arm, seed, curve))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "success.svg").write_text(svg(study, curves), encoding="utf-8")
    return 0


def train(study: Study, arm: str, seed: int, steps: int, folder: Path) -> None:
    """Runs the training until it reaches the goal or its last step."""
    if is_over(study, Curve.read(folder), steps) or has_failed(folder):
        return
    command = [
        str(Path(sys.executable).with_name("agentic-train")),
        "--config",
        str(study.config),
        *study.arms[arm],
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.steps={steps}",
        f"trainer.run_dir={folder}",
        "logging.progress=plain",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{study.folder}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    stopping = False
    while process.poll() is None:
        if not stopping and Curve.read(folder).reached(study.goal) is not None:
            stopping = True
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    if not is_over(study, Curve.read(folder), steps) and not has_failed(folder):
        raise SystemExit(f"the run {folder} ended with exit code {process.returncode}")


def is_over(study: Study, curve: Curve, steps: int) -> bool:
    return curve.reached(study.goal) is not None or curve.steps >= steps


def has_failed(folder: Path) -> bool:
    """Whether the run ended with an error: ten steps in a row had nothing to learn from."""
    summary = folder / "summary.json"
    return (
        summary.exists()
        and json.loads(summary.read_text(encoding="utf-8")).get("status") == "failed"
    )


def row(study: Study, arm: str, seed: int, curve: Curve) -> str:
    """The line of the table."""
    last, goal = curve.evaluations[-1], curve.reached(study.goal)
    shown = " ".join(f"{e.success:.2f}".removeprefix("0") for e in curve.evaluations)
    spent = (
        f"not reached in {last.step} | {last.tokens:,}"
        if goal is None
        else f"{goal.step} | {goal.tokens:,}"
    )
    return f"| {arm} | {seed} | {shown} | {spent} | {curve.seconds:.0f} |"


def svg(study: Study, curves: Mapping[tuple[str, int], Curve]) -> str:
    """All curves as an image: success of the evaluations by sampled tokens."""
    colours = dict(zip(study.arms, COLOURS, strict=False))
    most = max((e.tokens for curve in curves.values() for e in curve.evaluations), default=1) or 1
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN

    def place(tokens: float, success: float) -> str:
        x = MARGIN + tokens / most * (right - MARGIN)
        return f"{x:.1f},{bottom - success * (bottom - MARGIN):.1f}"

    lines = [
        f'<polyline points="{" ".join(place(e.tokens, e.success) for e in curve.evaluations)}" '
        f'fill="none" stroke="{colours[arm]}" stroke-width="1.5"/>'
        for (arm, _), curve in curves.items()
    ]
    names = [
        f'<text x="{MARGIN + 20}" y="{MARGIN + 18 * number}" fill="{colours[arm]}">{arm}</text>'
        for number, arm in enumerate(study.arms, 1)
    ]
    legend = "success of the evaluations, from 0 to 1"
    if study.goal is not None:
        ends = f"{place(0, study.goal)} {place(most, study.goal)}"
        lines.append(f'<polyline points="{ends}" stroke="#999" {DASHES}/>')
        legend += f"; dashed: {study.goal}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="black"/>',
            *lines,
            *names,
            f'<text x="{MARGIN}" y="{MARGIN - 10}">{legend}</text>',
            f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{most:,} sampled tokens</text>',
            "</svg>\n",
        ]
    )
