"""python -m benchmarks.gpu.card: how near the trainer's step is to what the card can do.

Each row is a process of its own of at most `LIMIT_S`, so that one that fails costs one row; rows
are kept in `--rows`, and done ones are not measured again. Models have random weights in the shapes
of published ones; a batch is 8 trials of about 15,000 tokens, of which 8,000 are shared. Exits with
1 if a row failed.

- *step*: optimizer steps, compiled, with as many layers recomputed as the plan says; *filled*: with
  micro-batches as large as it has room for. Share: model FLOP/s ÷ the card's peak for dense
  bfloat16, every token counted, and those computed counted.
- *waits*: synchronisations of host and device in a step, by torch's own debug mode.
- *copy*: all weights, copied within the card: what the pause of an update is compared with.
- *start*, *answers*, *first trial*, *vllm serve*: with a real vLLM (`served.py`).
- *profile*: kernels of one step by time.

After the rows, the goals: each as a figure of the rows, or that no card has shown it yet.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.endings import reason
from benchmarks.gpu import served
from benchmarks.train.workloads import Workload, make_groups
from proxy.run_files.files import read_jsonl
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.correction import Correction
from trainer.batch import Batch, build_batch
from trainer.cluster.device_plan import fitted, gpus_here, plan_devices
from trainer.learning.models import Models
from trainer.learning.steps import update_policy
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.flops import training_flops, utilisation
from trainer.policy.policy import Policy
from trainer.ranks_config import RanksConfig

LIMIT_S = 120.0
"""Of a row, with torch's compilations."""
STEPS = 3
"""Timed steps, after one that compiles."""
BATCH = Workload(1, 8, 8000, 10, (200, 800), (100, 300), 0)
SMALL_BATCH = Workload(1, 4, 60, 2, (10, 30), (5, 20), 0)
SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    # width, width of the MLP, layers, heads, of keys, vocabulary, tokens of a micro-batch
    "tiny": (64, 128, 2, 2, 1, 500, 512),
    "0.6b": (1024, 3072, 28, 16, 8, 151936, 32768),
    "1.7b": (2048, 6144, 28, 16, 8, 151936, 32768),
    "4b": (2560, 9728, 36, 32, 8, 151936, 32768),
    "8b": (4096, 12288, 36, 32, 8, 151936, 32768),
}
COMPILED = {"compile_layers": True}
HALF = {**COMPILED, "weights_dtype": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Row:
    """Example: Row("step", "1.7b")"""

    kind: str
    shape: str
    shares: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `model`."""

    @property
    def name(self) -> str:
        if self.kind in SERVED:
            return f"{self.kind} {self.shape}"
        own = [
            "shared" if self.shares else "not shared",
            *("LoRA" for _ in self.model.get("lora", ())),
        ]
        own += ["eager"] * (not self.model.get("compile_layers"))
        own += ["filled"] * (self.model.get("max_micro_batch_tokens", 0) is None)
        return f"{self.kind} {self.shape}, {', '.join(dict.fromkeys(own))}"


ROWS = (
    Row("step", "1.7b", shares=False, model=COMPILED),
    Row("step", "1.7b", model=COMPILED),
    Row("step", "1.7b", shares=False),
    Row("step", "1.7b", shares=False, model={**COMPILED, "max_micro_batch_tokens": None}),
    Row("step", "4b", shares=False, model=HALF),
    Row("step", "8b", shares=False, model={**HALF, "lora": {"rank": 16}}),
    Row("step", "0.6b", shares=False, model=COMPILED),
    Row("step", "0.6b", model=COMPILED),
    Row("waits", "0.6b", model=COMPILED),
    Row("copy", "1.7b", model=COMPILED),
    Row("start", "0.6b"),
    Row("answers", "0.6b"),
    Row("first trial", "with cold caches"),
    Row("vllm serve", "quickstart"),
    Row("first trial", "quickstart"),
    Row("profile", "1.7b", shares=False, model=COMPILED),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of one row, or its ratio to that of another.

    Example: Goal("waits in a step", "≤ 1", ("waits 0.6b, shared", "waits"))
    """

    name: str
    wanted: str
    figure: tuple[str, str]
    """A row's name, and a key of it."""
    over: tuple[str, str] | None = None

    def of(self, rows: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Its value; None: a row of it has no such figure."""
        value = 1.0
        for key, power in ((self.figure, 1), (self.over, -1)):
            if key is None:
                continue
            found = rows.get(key[0], {}).get(key[1])
            if not isinstance(found, int | float):
                return None
            value *= found**power
        return value


GOALS = (
    Goal("share of the card, 1.7 B", "≥ 0.45", ("step 1.7b, not shared", "share")),
    Goal("share of the card, 4 B", "≥ 0.45", ("step 4b, not shared", "share")),
    Goal("share of the card, 8 B with LoRA", "≥ 0.45", ("step 8b, not shared, LoRA", "share")),
    Goal(
        "share of what is computed, prefixes shared ÷ not shared",
        "≥ 0.97",
        ("step 1.7b, shared", "share of computed"),
        ("step 1.7b, not shared", "share of computed"),
    ),
    Goal("CPU seconds ÷ seconds of a step of 0.6 B", "≤ 1.2", ("step 0.6b, shared", "CPU s ÷ s")),
    Goal("waits in a step, with one for the metrics", "≤ 1", ("waits 0.6b, shared", "waits")),
    Goal("answers/s through the proxy ÷ the same vLLM alone", "≥ 0.97", ("answers 0.6b", "÷")),
    Goal(
        "seconds until the first trial ÷ a bare vllm serve",
        "≤ 1.1",
        ("first trial quickstart", "seconds"),
        ("vllm serve quickstart", "seconds"),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.card", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rows", type=Path, default=Path("-"), help="a file that keeps the rows")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="some rows, by name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = ROWS if given.device == "cuda" else _rehearsed()
    if given.row is not None:
        (row,) = (each for each in rows if each.name == given.row)
        print(json.dumps(_measured(row, given.device)))
        return 0
    known = {each["row"]: each for each in read_jsonl(given.rows) if "failed" not in each}
    print("| row | figures |\n|---|---|", flush=True)
    failed, done = False, {}
    for row in rows:
        if given.only and row.name not in given.only:
            continue
        found = known.get(row.name)
        if found is None:
            found = {"row": row.name, **_in_a_process(row, given.device)}
            if given.rows != Path("-"):
                with given.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
        failed |= "failed" in found
        done[row.name] = found
        shown = [f"{key} {_shown(value)}" for key, value in found.items() if key != "row"]
        print(f"| {row.name} | {'; '.join(shown)} |", flush=True)
    print("\n| goal | wanted | seen |\n|---|---|---|")
    for goal in GOALS:
        value = goal.of(done) if given.device == "cuda" else None
        seen = "not shown by a card yet" if value is None else _shown(value)
        print(f"| {goal.name} | {goal.wanted} | {seen} |", flush=True)
    return int(failed)


def _rehearsed() -> tuple[Row, ...]:
    """One of each kind, of the smallest shape."""
    return tuple(Row(kind, "tiny") for kind in dict.fromkeys(row.kind for row in ROWS))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _in_a_process(row: Row, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.card", "--device", device, "--row", row.name]
    limit_s = LIMIT_S if device == "cuda" else None
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {LIMIT_S:g} s"}
    if done.returncode:
        sys.stderr.write(done.stderr)
        return {"failed": reason(done.returncode, done.stderr)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(row: Row, device: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if row.kind in SERVED:
            return SERVED[row.kind](row.shape, device, Path(folder))
        return MEASURES[row.kind](Learning(row, device, Path(folder)))


class Learning:
    """A policy of the row's shape, and its batch. Example: Learning(row, "cuda", folder).step()"""

    def __init__(self, row: Row, device: str, folder: Path) -> None:
        *_, vocabulary, tokens = SHAPES[row.shape]
        settings = Qwen3Config(
            **_sizes(row.shape),
            vocab_size=vocabulary,
            max_position_embeddings=32768,
            tie_word_embeddings=row.shape != "8b",
            architectures=["Qwen3ForCausalLM"],
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        given = {
            "path": folder,
            "compute_dtype": "bfloat16",
            "max_micro_batch_tokens": tokens,
            "share_prefixes": row.shares,
            **row.model,
        }
        sections = {"model": given, "engine": {"urls": ("http://127.0.0.1:1",)}}
        config = RanksConfig.model_validate({**sections, "trainer": {"device": device}})
        gpus = gpus_here()
        self.config = fitted(config, gpus)
        plan = plan_devices(self.config, gpus)
        self.planned = None if plan is None else plan.rank
        self.device = torch.device(device)
        workload = BATCH if row.shape != "tiny" else SMALL_BATCH
        self.batch = build_batch(make_groups(workload, vocabulary))
        self.policy = Policy(self.config.model, OptimizerConfig(lr=1e-6), device=device)
        correction = Correction(weight=None)
        self.algorithm = Algorithm(AlgorithmConfig(prox="reuse", correction=correction))
        self.algorithm.compute_advantages(self.batch)
        self.models = Models(self.policy, self.algorithm)

    def step(self) -> float:
        """Seconds of an optimizer step on the batch."""
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        update_policy(self.models, self.batch, temperature=1.0, version=0, generator=generator)
        return time.perf_counter() - began

    @property
    def computed(self) -> Batch:
        """The batch without the tokens that are computed once for several trials."""
        count = sum(len(micro.ids) for micro in self.policy.pack(self.batch))
        part, lengths = copy.copy(self.batch), [len(ids) for ids in self.batch.sequences]
        kept = [round(length * count / sum(lengths)) for length in lengths]
        part.sequences = tuple(ids[:n] for ids, n in zip(part.sequences, kept, strict=True))
        return part


def _step(learning: Learning) -> dict[str, Any]:
    first_s = learning.step()
    if learning.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cpu = time.process_time()
    seconds = [learning.step() for _ in range(STEPS)]
    cpu, mean = (time.process_time() - cpu) / STEPS, sum(seconds) / STEPS
    model, batch = learning.config.model, learning.batch
    found: dict[str, Any] = {
        "seconds": mean,
        "first": first_s,
        "tokens/s": batch.input_tokens / mean,
        "CPU s ÷ s": cpu / mean,
        "recomputed layers": model.recomputed_layers or ("all" if model.checkpoints else 0),
        "tokens of a micro-batch": model.micro_batch_tokens,
    }
    policy = learning.policy
    for name, counted in (("share", batch), ("share of computed", learning.computed)):
        flops = training_flops(policy.model.config, policy.multiplied_weights, counted, passes=1.0)
        if (share := utilisation(flops, mean, learning.device, 1)) is not None:
            found[name] = share
    if learning.device.type == "cuda":
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if learning.planned is not None:
        found["plan GiB"] = learning.planned.total / 2**30
    found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def _waits(learning: Learning) -> dict[str, Any]:
    learning.step()
    if learning.device.type != "cuda":
        return {"waits": "unknown without a GPU; tests/trainer/test_card.py counts them"}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            learning.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{each.filename}:{each.lineno}" for each in found if "synchron" in str(each.message)]
    return {"waits": len(places), "at": sorted(set(places))}


def _copy(learning: Learning) -> dict[str, Any]:
    weights = [weight.detach() for weight in learning.policy.model.parameters()]
    copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    seconds = []
    for _ in range(3):
        _synchronize(learning.device)
        began = time.perf_counter()
        for into, weight in zip(copies, weights, strict=True):
            into.copy_(weight)
        _synchronize(learning.device)
        seconds.append(time.perf_counter() - began)
    size = sum(each.nbytes for each in copies)
    return {"seconds": min(seconds), "GB": size / 1e9}


def _profile(learning: Learning) -> dict[str, Any]:
    learning.step()
    with torch.profiler.profile() as found:
        learning.step()
        _synchronize(learning.device)
    key = "self_device_time_total" if learning.device.type == "cuda" else "self_cpu_time_total"
    kernels = sorted(found.key_averages(), key=lambda each: -getattr(each, key))
    return {
        each.key[:60]: f"{getattr(each, key) / 1e3:.1f} ms, {each.count} times"
        for each in kernels[:30]
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _sizes(shape: str) -> dict[str, int]:
    """Of the layers, as a configuration has them."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    sizes = dict(zip(names, SHAPES[shape], strict=False))
    return sizes | {"head_dim": 32 if shape == "tiny" else 128}


MEASURES = {"step": _step, "waits": _waits, "copy": _copy, "profile": _profile}
SERVED: dict[str, Callable[[str, str, Path], dict[str, Any]]] = {
    "start": lambda shape, device, folder: served.started(_sizes(shape), device, folder),
    "answers": lambda shape, device, folder: served.answers(_sizes(shape), device, folder),
    "first trial": lambda _shape, device, _folder: served.first_trial(device),
    "vllm serve": lambda _shape, device, folder: served.bare_serve(device, folder),
}

if __name__ == "__main__":
    sys.exit(main())
