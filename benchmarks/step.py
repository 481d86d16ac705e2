"""What a training step of the quickstart costs, by part.

Processor time of one run from the end of its step `--after` to the end of its last step, divided by
the steps between, and the same of each phase by the clock. Agents and verifiers are processes too
short to be followed: their share is what the machine used beside the named parts, so nothing else
may run. `--against DIR` measures another checkout, such as an older commit with its own `.venv`, in
turns with this one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from proxy.run_files.files import read_jsonl
from trainer.run.folder import RunFolder

HERE = Path(__file__).resolve().parents[1]
POLL_S = 0.1
PARTS = {"vllm_launch": "engine", "VLLM::": "engine", "proxy serve": "proxy"}
"""Words of a command line → the part that the process is."""
REST = "agents and verifiers"

Cost = defaultdict[str, float]
"""Part → processor seconds; and phase → seconds by the clock."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--after", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    given = parser.parse_args()
    places = [HERE, *([given.against.absolute()] if given.against else [])]
    measured: dict[Path, list[Cost]] = {place: [] for place in places}
    for _ in range(given.repeats):
        for place in places:
            measured[place].append(step(place, given.after, given.steps))
            sys.stderr.write(f"{place}: {dict(measured[place][-1])}\n")
    print("| per step | " + " | ".join(place.name for place in places) + " |")
    print("|---" * (1 + len(places)) + "|")
    for name in sorted({name for costs in measured.values() for cost in costs for name in cost}):
        figures = [median(cost[name] for cost in costs) * 1e3 for costs in measured.values()]
        print(f"| {name} | " + " | ".join(f"{figure:.0f} ms" for figure in figures) + " |")


def step(place: Path, after: int, steps: int) -> Cost:
    """The cost of one step, the mean of those after the step `after`."""
    with tempfile.TemporaryDirectory() as runs, tempfile.TemporaryFile() as output:
        folder = RunFolder(Path(runs, "run"))
        settings = [f"trainer.run_dir={folder.path}", f"trainer.steps={steps}", "data.val_files=[]"]
        process = subprocess.Popen(
            [".venv/bin/agentic-train", "--config", "agentic_trainer.yaml", *settings],
            cwd=place,
            stdout=output,
            stderr=output,
        )
        used: list[tuple[float, Cost]] = []
        while process.poll() is None:
            with suppress(psutil.Error):
                used.append((time.time(), _used(psutil.Process(process.pid))))
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        if process.returncode != 0:
            output.seek(0)
            raise SystemExit(f"the run failed: {output.read().decode()}")
        phases = list(read_jsonl(folder.path / "phases.jsonl"))
    begin, end = (_end_of(phases, number) for number in (after, steps))
    before, later = (next(cost for at, cost in used if at >= moment) for moment in (begin, end))
    cost = Cost(float, {part: later[part] - before[part] for part in later})
    for phase in phases:
        if after < phase["step"] <= steps and phase["started_at"] < end:
            cost[f"{phase['phase']}, by the clock"] += phase["seconds"]
    return Cost(float, {name: seconds / (steps - after) for name, seconds in cost.items()})


def _end_of(phases: list[dict[str, Any]], step: int) -> float:
    """When the step was trained."""
    (trained,) = (each for each in phases if (each["step"], each["phase"]) == (step, "training"))
    return float(trained["started_at"] + trained["seconds"])


def _used(trainer: psutil.Process) -> Cost:
    """Processor seconds until now of the named parts, and of the rest of the machine."""
    cost = Cost(float)
    for process in (trainer, *trainer.children(recursive=True)):
        with suppress(psutil.Error):
            line, times = " ".join(process.cmdline()), process.cpu_times()
            part = next((part for word, part in PARTS.items() if word in line), "")
            part = "trainer" if process.pid == trainer.pid else part
            if part:
                cost[part] += times.user + times.system
    machine = psutil.cpu_times()
    cost[REST] = machine.user + machine.system + machine.nice - sum(cost.values())
    return cost


if __name__ == "__main__":
    main()
