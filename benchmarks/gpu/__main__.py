"""`make bench-gpu`: everything that only GPUs can show, unattended, as two tables.

    make bench-gpu                           all GPUs of this machine
    make bench-gpu ARGS=--rehearse           the same parts on a CPU, as far as they go there
    make bench-gpu ARGS="--only sleep nccl"    some parts

A part is a training run of the quickstart or of a recipe (docs/recipes.md), whose record is read,
or a benchmark of its own. A part that fails, or lasts longer than `--limit-s`, does not stop the
others; its log is in `--out`. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from proxy.run_files.files import read_jsonl
from trainer.run.folder import RunFolder

TRAIN = (".venv/bin/agentic-train", "--config", "agentic_trainer.yaml", "data.val_files=[]")
RECIPE = "examples/recipes/train.sh"
RECIPES = [
    (model, agent)
    for model in ("qwen3-8b", "qwen3.5-4b")
    for agent in ("claude-code", "codex", "mini-swe-agent")
]
BFLOAT16 = "model.compute_dtype=bfloat16"
FIGURES = {
    "mismatch": ("mismatch/logp_abs_mean", "{:.1e}"),
    "probe": ("sync/probe_abs_mean", "{:.1e}"),
    "paused": ("sync/paused_s", "{:.3f} s"),
    "update": ("sync/total_s", "{:.3f} s"),
    "step": ("time/step_s", "{:.1f} s"),
    "tokens/s": ("throughput/tokens_per_s", "{:.0f}"),
}
"""Column → the metric of a run, and how it is shown: the mean of all steps after the first."""


@dataclass(frozen=True, slots=True)
class Part:
    """Example: Part("sleep", 1, ("engine.sleep=true",))"""

    name: str
    gpus: int
    """Number of GPUs that it needs at least; a rehearsal needs none."""
    settings: Sequence[str] = ()
    """Of a training run."""
    rehearsed: Sequence[str] = ()
    """Settings of the rehearsal, in addition; they replace what a CPU cannot do."""
    program: Sequence[str] = TRAIN
    """The training run's command."""
    limit_s: float = 0.0
    """How long the part may last at least, whatever `--limit-s` says."""
    module: str = ""
    """A benchmark instead of a training run."""
    arguments: Sequence[str] = ()
    on_cpu: Sequence[str] = ()
    """The benchmark's arguments in a rehearsal."""


def parts(count: int) -> list[Part]:
    """What is run on this number of GPUs."""
    ranks = [str(number) for number in (1, 2, 4, 8) if number <= max(count, 1)]
    on_two = ("trainer.ranks=2", "trainer.mode=colocated")
    return [
        Part("one GPU, float32", 1),
        Part("one GPU, bfloat16", 1, (BFLOAT16,)),
        Part("sleep", 1, ("engine.sleep=true",), ("engine.sleep=false",)),
        Part("separate", 2, ("trainer.mode=separate",)),
        Part(
            "nccl",
            2,
            ("engine.weight_transfer=nccl", "trainer.mode=separate"),
            ("engine.weight_transfer=gloo",),
        ),
        Part("gloo", 2, ("engine.weight_transfer=gloo", "trainer.mode=separate")),
        Part("two ranks", 2, on_two),
        Part("tensor parallel", 2, (*on_two, "trainer.tensor_parallel=2")),
        Part("context parallel", 2, (*on_two, "trainer.context_parallel=2")),
        Part("two engines", 3, ("engine.replicas=2", "trainer.mode=separate")),
        *(_recipe(model, agent) for model, agent in RECIPES),
        _recipe("qwen3-8b", "codex", gpus=8),
        _recipe("qwen3.5-4b", "codex", gpus=8),
        Part(
            "packed training",
            1,
            module="benchmarks.train",
            arguments=("--device", "cuda"),
            on_cpu=("--workloads", "single-turn", "--steps", "1"),
        ),
        Part(
            "host tier",
            1,
            module="benchmarks.scheduling",
            arguments=(
                *("--layers", "28", "--hidden", "2048", "--agents", "100", "--turns", "20"),
                *("--pause-s", "1", "--cache-mib", "1600", "--host-gib", "8"),
            ),
            on_cpu=("--agents", "4", "--turns", "4", "--cache-mib", "8", "--host-gib", "0.25"),
        ),
        Part(
            "memory of shared micro-batches",
            1,
            module="benchmarks.context_parallel",
            arguments=("--device", "cuda", "--ranks", *ranks),
            on_cpu=("--tokens", "512", "--ranks", "1", "2"),
        ),
    ]


def _recipe(model: str, agent: str, gpus: int = 1) -> Part:
    """A recipe with fewer trials than it has: 16 a step, and 4 in a rehearsal, on a tiny model."""
    few = ("rollout.groups_per_step=4", "rollout.group_size=4", "data.val_harbor_dir=[]")
    fewer = ("--tiny", "rollout.groups_per_step=2", "rollout.group_size=2")
    return Part(
        f"{model} {agent}{', eight GPUs' if gpus > 1 else ''}",
        gpus,
        (*(("--eight-gpus",) if gpus > 1 else ()), *few),
        fewer,
        (RECIPE, model, agent),
        limit_s=7200,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, without GPUs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some parts, by name")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"))
    given = parser.parse_args()
    count = torch.cuda.device_count()
    if not count and not given.rehearse:
        raise SystemExit("no GPU here; --rehearse runs the same parts on a CPU")
    chosen = [each for each in parts(count) if not given.only or each.name in given.only]
    if unknown := set(given.only or ()) - {each.name for each in chosen}:
        raise SystemExit(f"no part {min(unknown)!r}; there are: {', '.join(_names(count))}")
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{_machine()}; logs in {given.out}\n")
    print(f"| part | result | seconds | {' | '.join(FIGURES)} |")
    print("|---" * (3 + len(FIGURES)) + "|", flush=True)
    failed, tables = False, []
    for part in chosen:
        result, seconds, run = _executed(part, count, given)
        figures = _figures(run) if result == "done" and not part.module else {}
        shown = [figures.get(name, "") for name in FIGURES]
        print(f"| {part.name} | {result} | {seconds:.0f} | {' | '.join(shown)} |", flush=True)
        failed |= result.startswith("failed")
        if part.module and result == "done":
            lines = (given.out / f"{_file(part)}.log").read_text(encoding="utf-8").splitlines()
            tables.append((part.name, [line for line in lines if line.startswith("|")]))
    for name, table in tables:
        print(f"\n{name}:\n", *table, sep="\n")
    return int(failed)


def _executed(part: Part, count: int, given: argparse.Namespace) -> tuple[str, float, Path]:
    """The result, the seconds that it took, and the folder of its run."""
    run = given.out / f"{_file(part)}-{int(time.time())}"
    if not given.rehearse and part.gpus > count:
        return f"needs {part.gpus} GPUs", 0.0, run
    if part.module:
        arguments = part.on_cpu if given.rehearse else part.arguments
        command = [sys.executable, "-m", part.module, *arguments]
    else:
        own = [*part.settings, *(part.rehearsed if given.rehearse else ())]
        where = ["trainer.device=cpu"] if given.rehearse else []
        length = f"trainer.steps={given.steps}"
        command = [*part.program, f"trainer.run_dir={run}", length, *own, *where]
    began, limit_s = time.monotonic(), max(given.limit_s, part.limit_s)
    server = {"HARBOR_SERVER_PORT": "0", "HARBOR_STATE_DIR": str(given.out / "harbor-server")}
    with (given.out / f"{_file(part)}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **server}, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"failed: more than {limit_s:g} s", time.monotonic() - began, run
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    seconds = time.monotonic() - began
    return ("done" if code == 0 else f"failed: exit code {code}"), seconds, run


def _figures(run: Path) -> dict[str, str]:
    """What the run recorded after its first step, by column."""
    steps = [each for each in _steps(run) if each["step"] > 1]
    found = {}
    for name, (metric, form) in FIGURES.items():
        values = [each[metric] for each in steps if metric in each]
        found[name] = form.format(mean(values)) if values else ""
    return found


def _steps(run: Path) -> Iterator[dict[str, Any]]:
    return read_jsonl(RunFolder(run).path / "metrics.jsonl")


def _names(count: int) -> list[str]:
    return [each.name for each in parts(count)]


def _file(part: Part) -> str:
    return part.name.replace(" ", "-").replace(",", "")


def _machine() -> str:
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(gpus) or 'no GPU'}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
