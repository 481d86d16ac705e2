"""Tokens/s and peak memory of a training step, side by side.

Each contestant is a separate process, so that its peak memory can be measured. They make their
steps in turn, so that other work on the machine affects all of them. Peak memory is what the steps
need in addition to model and libraries: gradients, moments and activations. Tokens are the input
tokens of all sequences (those that a dense step computes), so shared prefixes show as a higher
rate. CPU seconds show the cost of a step independently of other work on the machine. A contestant
that runs out of memory or ends is a row that says so; the others go on, and the exit status is 1.
Stopped by SIGTERM, it shows what it has measured by then.
`pieces` (the default of a run) computes a prefix once for the batch, `tree` once for a micro-batch.

With `--tokens`, no model is trained: the tokens that a step computes, for recorded sessions of
agents at several sizes of micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.endings import reason
from benchmarks.train import contestants
from benchmarks.train.workloads import SESSIONS, WORKLOADS, Recorded, make_groups
from trainer.batch import build_batch
from trainer.rows.prefix_tree import Forest, divide, lay_out

MODELS = {
    # the quickstart's starter model
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab": 1024},
    # Qwen3-0.6B, random weights
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab": 151936,
    },
}
CONTESTANTS = ("pieces", "tree", "packed", "trl")
ALL_WORKLOADS = WORKLOADS | SESSIONS
MICRO_BATCHES = (4096, 8192, 16384, 65536)


class Stopped(Exception):
    """SIGTERM has come."""


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--workloads", nargs="+", choices=ALL_WORKLOADS, default=None)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=3, help="timed steps after the warm-up")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument(
        "--shorter", type=int, default=1, help="divide the tokens of recorded sessions by this"
    )
    parser.add_argument(
        "--trl-rows",
        type=int,
        default=8,
        help="most rows of TRL's micro-batch, for a machine whose memory has no room for 8",
    )
    parser.add_argument("--tokens", action="store_true", help="count tokens, train nothing")
    parser.add_argument("--one", nargs=3, metavar=("CONTESTANT", "WORKLOAD", "PATH"))
    arguments = parser.parse_args()
    if arguments.one:
        contestant, workload, path = arguments.one
        _serve_steps(contestant, workload, path, arguments)
        return 0
    signal.signal(signal.SIGTERM, _stop)
    if arguments.tokens:
        _print_tokens(arguments.workloads or list(SESSIONS))
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.model, Path(folder))
        columns = ["workload", "contestant", "step s", "CPU s", "tokens/s", "over TRL"]
        columns += ["over TRL, CPU", "peak MB", "gradient norm"]
        print("| " + " | ".join(columns) + " |")
        print("|---" * len(columns) + "|")
        for workload in arguments.workloads or list(WORKLOADS):
            results, stopped = _side_by_side(workload, folder, arguments)
            trl = results.get("trl")
            for name, result in results.items():
                if isinstance(result, str):
                    empty = " | ".join([""] * (len(columns) - 3))
                    print(f"| {workload} | {name} | failed: {result} | {empty} |", flush=True)
                    failed = True
                else:
                    compared = None if isinstance(trl, str) else trl
                    print(_row(workload, name, result, compared), flush=True)
            if stopped:
                return 128 + signal.SIGTERM
    return int(failed)


def _print_tokens(workloads: list[str]) -> None:
    columns = ["workload", "micro-batch", "tree", "a row each", "tree in a micro-batch", "pieces"]
    columns += ["pieces ÷ tree", "also read", "passes", "longest pass"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for name in workloads:
        batch = build_batch(make_groups(ALL_WORKLOADS[name], 1024))
        tree = Forest.of(batch, range(len(batch.sequences))).tokens
        for tokens in MICRO_BATCHES:
            whole, ours = (
                lay_out(
                    batch, divide(batch, max_tokens=tokens, share_prefixes=True, in_pieces=pieces)
                )
                for pieces in (False, True)
            )
            trained = sum(len(micro.ids) for micro in ours if not micro.reads_only)
            read = sum(len(micro.ids) for micro in ours if micro.reads_only)
            counts = (tree, batch.input_tokens, sum(len(micro.ids) for micro in whole), trained)
            cells = [name, f"{tokens:,}", *(f"{each:,}" for each in counts)]
            cells += [f"{trained / tree:.3f}", f"{read:,}", str(len(ours))]
            cells.append(f"{max(len(micro.ids) for micro in ours):,}")
            print("| " + " | ".join(cells) + " |", flush=True)


def _side_by_side(
    workload: str, folder: str, arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, float] | str], bool]:
    """For each contestant its figures, or why it has none; and whether they were stopped."""
    with ExitStack() as open_files:
        errors = {
            name: open_files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            for name in arguments.contestants
        }
        processes = {name: _start(name, workload, folder, errors[name]) for name in errors}
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
        ended: dict[str, str] = {}
        stopped = False
        try:
            for _ in range(arguments.warm_up + arguments.steps):
                for name, process in processes.items():
                    if name not in ended and (line := _step(process)):
                        steps[name].append(json.loads(line))
                        print(f"{workload}, {name}: {line}", end="", file=sys.stderr, flush=True)
                    elif name not in ended:
                        process.communicate()
                        ended[name] = reason(process.returncode, _shown(errors[name]))
        except Stopped:
            stopped = True
            for name, process in processes.items():
                process.kill()
                if name not in ended and len(steps[name]) <= arguments.warm_up:
                    ended[name] = f"stopped after {len(steps[name])} steps"
        for name, process in processes.items():
            if process.returncode is None:
                process.communicate()
                _shown(errors[name])
    timed = {name: each for name, each in steps.items() if name not in ended}
    figures = {
        name: each[-1]
        | {
            key: statistics.median(t[key] for t in each[arguments.warm_up :])
            for key in ("wall", "cpu")
        }
        for name, each in timed.items()
    }
    return {name: ended.get(name) or figures[name] for name in processes}, stopped


def _step(process: subprocess.Popen[str]) -> str:
    """What the contestant prints of its next step; empty if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("step\n")
        process.stdin.flush()
    return process.stdout.readline()


def _shown(errors: IO[str]) -> str:
    """What the contestant printed on standard error, which is shown here, too."""
    errors.seek(0)
    text = errors.read()
    sys.stderr.write(text)
    return text


def _start(name: str, workload: str, folder: str, errors: IO[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.train", *sys.argv[1:]]
    command += ["--one", name, workload, folder]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
    )


def _serve_steps(name: str, workload: str, path: str, arguments: argparse.Namespace) -> None:
    """A contestant's process: it makes a step for every line on standard input."""
    vocabulary = MODELS[arguments.model]["vocab"]
    shape = ALL_WORKLOADS[workload]
    shape = shape.shorter(arguments.shorter) if isinstance(shape, Recorded) else shape
    batch = build_batch(make_groups(shape, vocabulary))
    device, dtype = arguments.device, arguments.dtype
    with contextlib.redirect_stdout(sys.stderr):
        if name == "trl":
            step = contestants.trl(Path(path), batch, device, dtype, arguments.trl_rows)
        else:
            step = contestants.ours(
                Path(path),
                batch,
                device,
                dtype,
                share_prefixes=name != "packed",
                in_pieces=name == "pieces",
                micro_batch_tokens=arguments.micro_batch_tokens,
            )
    before = _held_mb(device)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        grad_norm = step()
        _synchronize(device)
        result = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "tokens": float(batch.input_tokens),
            "peak_mb": _peak_mb(device) - before,
            "grad_norm": grad_norm,
        }
        print(json.dumps(result), flush=True)


def _row(workload: str, name: str, got: dict[str, float], trl: dict[str, float] | None) -> str:
    over = f"{trl['wall'] / got['wall']:.1f}x | {trl['cpu'] / got['cpu']:.1f}x" if trl else " | "
    rate = got["tokens"] / got["wall"]
    return (
        f"| {workload} | {name} | {got['wall']:.2f} | {got['cpu']:.2f} | {rate:,.0f} | {over} "
        f"| {got['peak_mb']:,.0f} | {got['grad_norm']:.6f} |"
    )


def save_model(name: str, folder: Path, context: int = 32768) -> None:
    """Writes a random one of `MODELS`."""
    sizes = dict(MODELS[name])
    settings = Qwen3Config(
        vocab_size=sizes.pop("vocab"),
        num_attention_heads=sizes["hidden_size"] // (32 if name == "tiny" else 64),
        num_key_value_heads=2 if name == "tiny" else 8,
        head_dim=32 if name == "tiny" else 128,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)


def _peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _held_mb(device: str) -> float:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
