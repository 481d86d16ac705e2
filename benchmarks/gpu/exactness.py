"""python -m benchmarks.gpu.exactness: the trainer's scores and gradients beside float64.

For every class of docs/models.md, a small random model computes branching paths of up to 250 tokens
packed and as a tree on the device, in float32 and in bfloat16, on a GPU with compiled layers. The
reference is the model's own eager code over each path alone, in float64 on the CPU; experts are
computed there one by one (`experts_implementation="eager"`), because the grouped product knows no
float64. transformers itself computes some things in float32 (linear layers, routers, norms).

Classes are computed in processes of their own, each of which ends at an error, so that one that
leaves a GPU unusable costs one row. Rows are kept in `--rows`; done ones are not computed again.
Exits with 1 if a row failed: float32 further than `TOLERANCE`, or no result.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.endings import reason
from benchmarks.train.workloads import Workload, make_groups
from proxy.run_files.files import read_jsonl
from tests.trainer.policy.architectures import ARCHITECTURES
from trainer.batch import Batch, build_batch
from trainer.policy.architecture import without_noise
from trainer.policy.compiled_layers import compile_layers
from trainer.policy.model_config import DTYPES
from trainer.policy.proof_on_copy import random_copy
from trainer.policy.scorer import CausalScorer, use_packed_rows
from trainer.policy.shrink import EXPERTS, VOCABULARY, number_of, shrunk
from trainer.rows.packing import pack

TOLERANCE = 3e-4
"""Of float32, in log-probabilities and relative to a gradient's largest element. Measured: 4e-5
(linear layers, on an H200); a mistake of an architecture is above 1e-3."""
PATHS = Workload(2, 3, 60, 2, (40, 80), (5, 20), 1)
CLASSES = {each.title: each for each in ARCHITECTURES if not each.refused}
COLUMNS = ("class", "type", "max Δ log p", "mean Δ log p", "gradient", "seconds", "result")

ONE_AT_A_TIME = Lock()
"""Of the threads that read from workers."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.exactness", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--rows", type=Path, help="a file that keeps the rows")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="processes at a time, each with one thread (default: half of the cores)",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return _compute(given.classes, given.device)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    known = {(row["class"], row["type"]): row for row in read_jsonl(given.rows or Path("-"))}
    known = {key: row for key, row in known.items() if row["result"] == "done"}
    left = []
    for title in given.classes:
        keys = [(title, dtype) for dtype in DTYPES]
        if not known.keys() >= set(keys):
            left.append(title)
        else:
            for key in keys:
                _print(known[key])
    chunks = [left[number :: given.workers] for number in range(given.workers)]
    with ThreadPoolExecutor(given.workers) as pool:
        failures = list(pool.map(lambda chunk: _failures(chunk, given.device, given.rows), chunks))
    return int(any(failures))


def _failures(left: list[str], device: str, kept: Path | None) -> int:
    """Computes these classes; returns the number of rows that are not done."""
    count = 0
    while left:
        rows, left = _by_a_worker(left, device, kept)
        count += sum(row["result"] != "done" for row in rows)
    return count


def _by_a_worker(
    classes: Sequence[str], device: str, kept: Path | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that a process computes, the last of which may be a failure, and the classes that
    are left."""
    command = [sys.executable, "-m", "benchmarks.gpu.exactness", "--worker", "--device", device]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, "--classes", *classes],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            # Of small products, threads of several workers wait for each other.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        with process:
            assert process.stdout is not None
            rows = [_keep(json.loads(line), kept) for line in process.stdout]
            code = process.wait()
        errors.seek(0)
        output = errors.read()
    sys.stderr.write(output)
    done = {row["class"] for row in rows if row["type"] == list(DTYPES)[-1]}
    left = [title for title in classes if title not in done]
    if left:
        title, *left = left
        have = {row["type"] for row in rows if row["class"] == title}
        dtype = next(each for each in DTYPES if each not in have)
        failure = f"failed: {reason(code, output)}"
        rows.append(_keep({"class": title, "type": dtype, "result": failure}, kept))
    return rows, left


def _keep(row: dict[str, Any], kept: Path | None) -> dict[str, Any]:
    with ONE_AT_A_TIME:
        _print(row)
        if kept is not None:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return row


def _print(row: dict[str, Any]) -> None:
    cells = [row.get(name, "") for name in COLUMNS]
    shown = [f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(shown)} |", flush=True)


def _compute(classes: Sequence[str], device: str) -> int:
    """The worker: a line of JSON on standard output for each class and type."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for title in classes:
        model, batch, weights, exact = paths_and_reference(title)
        use_packed_rows(model)
        model = model.to(device)
        for dtype in DTYPES:
            if dtype == "bfloat16" and device == "cuda":  # as a run does
                compile_layers(model.get_decoder().layers)
            row = compare(model, batch, weights, exact, DTYPES[dtype], torch.device(device))
            print(json.dumps({"class": title, "type": dtype, **row}), flush=True)
    return 0


def paths_and_reference(
    title: str,
) -> tuple[Any, Batch, Tensor, tuple[Tensor, dict[str, Tensor]]]:
    """A small random model of the class, the paths with the weights of their losses, and its
    `reference`."""
    torch.manual_seed(0)
    model = random_copy(shrunk(without_noise(CLASSES[title].settings())))[0]
    batch = build_batch(make_groups(PATHS, VOCABULARY))
    weights = torch.randn(batch.num_tokens)
    return model, batch, weights, reference(model, batch, weights)


def reference(model: Any, batch: Batch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities `[N]` and gradients of the model's own code over each path alone, in
    float64."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    if number_of(own.config.get_text_config(), EXPERTS):
        own.set_experts_implementation("eager")
    own = own.double().eval()
    own.zero_grad()
    logprobs = []
    for index, ids in enumerate(batch.sequences):
        here = batch.sequence == index
        logits = own(torch.as_tensor(ids.astype(np.int64))[None], use_cache=False).logits[0]
        scores = logits.double().log_softmax(-1)[batch.position[here] - 1]
        logprobs.append(scores.gather(-1, batch.ids[here][:, None])[:, 0])
    scored = torch.cat(logprobs)
    (scored * weights).sum().backward()
    return scored.detach(), _gradients(own)


def compare(
    model: Any,
    batch: Batch,
    weights: Tensor,
    exact: tuple[Tensor, dict[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """The row of a type: the largest differences, packed or as a tree."""
    began, differences, gradients = time.monotonic(), [], []
    for share in (False, True):
        scorer = CausalScorer(model, dtype)
        scorer.train().zero_grad()
        (micro,) = pack(batch, max_tokens=1 << 20, share_prefixes=share)
        targets = micro.targets
        scored = scorer(micro.to(device), batch.ids[targets].to(device), 1.0)[0]
        (scored * weights[targets].to(device)).sum().backward()
        differences.append((scored.detach().double().cpu() - exact[0][targets]).abs())
        own = _gradients(model)
        gradients += [_distance(exact[1][name], own[name]) for name in own]
    # numpy's maximum is NaN if one of them is; Python's may be any other.
    largest = float(np.max([float(each.max()) for each in differences]))
    mean = float(np.max([float(each.mean()) for each in differences]))
    gradient = float(np.max(gradients))
    allowed = TOLERANCE if dtype == torch.float32 else float("inf")
    right = np.isfinite([largest, gradient]).all() and max(largest, gradient) <= allowed
    return {
        "max Δ log p": largest,
        "mean Δ log p": mean,
        "gradient": gradient,
        "seconds": f"{time.monotonic() - began:.1f}",
        "result": "done" if right else f"failed: more than {TOLERANCE:g}, or not finite",
    }


def _gradients(model: Any) -> dict[str, Tensor]:
    """In float64 on the CPU; zeros for a weight that no path reaches."""
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).double().cpu()
        for name, p in model.named_parameters()
    }


def _distance(exact: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest element (at least 1e-3)."""
    return float((exact - other).abs().max()) / max(float(exact.abs().max()), 1e-3)


if __name__ == "__main__":
    sys.exit(main())
