"""A weight update through shared memory, compared with one copy.

    python -m benchmarks.weight_sync --megabytes 50 500 --vllm

*stage* is the trainer's half, while the engines still sample: it copies each tensor to shared
memory and hashes it. *receive* is an engine's half, in a separate process: it hashes, compares and
copies into its own tensors. With `--vllm`, a real vLLM does that half, over HTTP, on a model with
random weights: staged before the pause, or loaded by vLLM during the pause, in turns. With
`--types`, a vLLM in bfloat16 gets weights that are trained in float32: as they are, or in its own
types, in turns. With `--adapters`, a vLLM gets LoRA adapters of several ranks on the same model
(`model.lora.update: adapter`), for which it is not paused. With `--sampling`, a vLLM samples
all the time, and in turns it stages weights or does not. The figures are milliseconds of CPU time
(wall time in brackets), the minimum of `--rounds`; those of vLLM are wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer
from trainer.engine import Backend
from trainer.policy.adapter import adapter_config, adapter_tensors
from trainer.policy.model_config import DTYPES
from trainer.weight_sync.adapters import AdapterSync
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named, SegmentReader, SegmentWriter, Written
from trainer.weight_sync.sync import SyncReport, WeightSync
from trainer.weight_sync.transports import Shapes, SharedMemoryTransport

ROWS, COLUMNS = 1024, 2048
"""Shape of each tensor: a linear layer of a small model."""
RANKS = (1, 8, 32)
"""Of the LoRA adapters, on all linear layers."""


CALLERS = 8
"""Number of answers that an engine samples at the same time."""
MEASURED_S = 5.0


class Cost(NamedTuple):
    cpu_ms: float
    wall_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync", description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vllm", action="store_true", help="also update a real vLLM")
    parser.add_argument("--adapters", action="store_true", help="with --vllm: send adapters, too")
    parser.add_argument("--types", action="store_true", help="with --vllm: one in bfloat16, too")
    parser.add_argument("--sampling", action="store_true", help="with --vllm: its speed meanwhile")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.receive:
        _serve_receives()
        return
    print("| weights | a copy | stage | receive | stage / copy | receive / copy | both / copy |")
    print("|---" * 7 + "|")
    for megabytes in arguments.megabytes:
        for dtype in arguments.dtypes:
            print(_row(megabytes, DTYPES[dtype], arguments.rounds), flush=True)
    if arguments.vllm:
        print("\n| sent to vLLM | bytes | share | paused | whole update | paused / copy |")
        print("|---" * 6 + "|")
        for megabytes in arguments.megabytes:
            print("\n".join(_vllm_rows(megabytes, arguments)), flush=True)
    if arguments.vllm and arguments.sampling:
        print("\n| weights | tokens/s | while it stages | of it |\n|---|---|---|---|")
        for megabytes in arguments.megabytes:
            print(_sampling_row(megabytes, arguments.rounds), flush=True)


def _row(megabytes: int, dtype: torch.dtype, rounds: int) -> str:
    weights = _weights(megabytes, dtype)
    copy = _copy_cost([tensor for _, tensor in weights], rounds)
    writer = SegmentWriter()
    stage = _least(lambda: writer.write(weights), rounds)
    received = _receive_cost(writer.write(weights), rounds)
    writer.close()
    shown = [f"{cost.cpu_ms:.1f} ({cost.wall_ms:.1f})" for cost in (copy, stage, received)]
    both = stage.cpu_ms + received.cpu_ms
    shown += [f"{ms / copy.cpu_ms:.2f}" for ms in (stage.cpu_ms, received.cpu_ms, both)]
    return f"| {megabytes} MB {str(dtype).removeprefix('torch.')} | " + " | ".join(shown) + " |"


def _weights(megabytes: int, dtype: torch.dtype) -> list[Named]:
    count = max(1, (megabytes << 20) // (ROWS * COLUMNS * dtype.itemsize))
    return [(f"layer.{i}", torch.randn(ROWS, COLUMNS).to(dtype)) for i in range(count)]


def _copy_cost(tensors: list[torch.Tensor], rounds: int) -> Cost:
    targets = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return _least(copy, rounds)


def _receive_cost(written: Written, rounds: int) -> Cost:
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--receive"]
    request = json.dumps([rounds, asdict(written)])
    done = subprocess.run(
        command, input=request, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return Cost(*json.loads(done.stdout))


def _serve_receives() -> None:
    """The engine's process, with tensors that already exist, as in a model."""
    rounds, fields = json.loads(sys.stdin.read())
    reader, written = SegmentReader(), Written(**fields)
    own = [torch.zeros_like(tensor) for _, tensor in reader.receive(written)]

    def load() -> None:
        for target, (_, tensor) in zip(own, reader.receive(written), strict=True):
            target.copy_(tensor)

    print(json.dumps(_least(load, rounds)))


def _least(work: Callable[[], object], rounds: int) -> Cost:
    """The minimum cost of `rounds` rounds, after one round that touches the memory."""
    work()
    cpu, wall = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        work()
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - started)
    return Cost(min(cpu) * 1e3, min(wall) * 1e3)


class _SometimesStaged(SharedMemoryTransport):
    """Lets the engine stage the weights, or load them while it is paused."""

    staged = True

    def stage(self, weights: Iterable[Named], shapes: Shapes | None) -> None:
        if self.staged:
            super().stage(weights, shapes)
        else:
            self._written = self.segment.write(weights)


def _vllm_rows(megabytes: int, arguments: argparse.Namespace) -> list[str]:
    """Reports wall times, because the CPU time is spent in another process."""
    rounds: int = arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = _save_model(path, megabytes)
        weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        with _serving(path, weight_transfer="shm") as url:
            staged, copy = _in_turns(url, weights, rounds)
        size = staged["staged"][0].size_bytes
        rows = {f"{size >> 20} MB float32, {how}": reports for how, reports in staged.items()}
        if arguments.types:
            rows |= _typed_reports(path, weights, rounds)
        if arguments.adapters:
            rows |= _adapter_reports(path, rounds)
    return [_sent(name, reports, size, copy) for name, reports in rows.items()]


def _in_turns(
    url: str, weights: list[Named], rounds: int
) -> tuple[dict[str, list[SyncReport]], Cost]:
    """Updates of both kinds and plain copies in turns, so that other work meets all of them."""
    sync = WeightSync(EngineControl([url]))
    sync.transport.close()
    sync.transport = transport = _SometimesStaged(sync.control)
    sync.push(weights, 0)  # the engine learns how to stage
    reports: dict[str, list[SyncReport]] = {"staged": [], "loaded while paused": []}
    copies = []
    for version in range(1, 1 + rounds):
        for kind, pushed in reports.items():
            transport.staged = kind == "staged"
            pushed.append(sync.push(weights, version))
            assert not transport.unstaged, transport.unstaged
        copies.append(_copy_cost([tensor for _, tensor in weights], 1))
    sync.close()
    return reports, Cost(*map(min, zip(*copies, strict=True)))


def _typed_reports(model: Path, weights: list[Named], rounds: int) -> dict[str, list[SyncReport]]:
    """Updates of a vLLM in bfloat16 with the weights in float32 and in its types, in turns."""
    reports: dict[str, list[SyncReport]] = {}
    shapes = [(name, tensor.to("meta")) for name, tensor in weights]
    backends: tuple[Backend, ...] = ("shm", "gloo")
    for backend in backends:
        with _serving(model, "bfloat16", weight_transfer=backend) as url:
            sync = WeightSync(EngineControl([url]), backend)
            sync.push(weights, 0, lambda: shapes)  # asks for its types, and it learns how to stage
            kinds: dict[str, Shapes | None] = {
                f"to bfloat16 by {backend}, as trained": None,
                f"to bfloat16 by {backend}, in its types": lambda: shapes,
            }
            for version in range(1, 1 + rounds):
                for kind, described in kinds.items():
                    pushed = sync.push(weights, version, described)
                    reports.setdefault(kind, []).append(pushed)
            sync.close()
    return reports


def _sampling_row(megabytes: int, rounds: int) -> str:
    """Tokens per second of an engine that samples all the time, without and with weights that it
    stages one after the other, in turns."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        model = _save_model(Path(folder), megabytes)
        weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        with _serving(Path(folder), weight_transfer="shm") as url, _sampling(url):
            sync = WeightSync(EngineControl([url]))
            sync.push(weights, 0)  # the engine learns how to stage
            for _ in range(rounds):
                for stages, measured in speeds.items():
                    measured.append(_speed(url, sync, weights if stages else None))
            sync.close()
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    alone, staging = median(speeds[False]), median(speeds[True])
    return f"| {size >> 20} MB float32 | {alone:.0f} | {staging:.0f} | {staging / alone:.2f} |"


def _speed(url: str, sync: WeightSync, staged: list[Named] | None) -> float:
    """Tokens per second over a few seconds, in which the weights are staged again and again."""
    began, tokens = time.perf_counter(), _sampled(url)
    while (passed_s := time.perf_counter() - began) < MEASURED_S:
        if staged is None:
            time.sleep(MEASURED_S - passed_s)
        else:
            sync.transport.stage(staged, None)
    return (_sampled(url) - tokens) / passed_s


def _sampled(url: str) -> float:
    """Number of tokens that the engine has sampled since its start."""
    with _open(url, "/metrics") as answer:
        found = re.search(r"^vllm:generation_tokens_total\S* (\S+)$", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


@contextmanager
def _sampling(url: str) -> Iterator[None]:
    """A context in which the engine always samples several answers."""
    ended = Event()
    sampling = {"max_tokens": 128, "min_tokens": 128, "temperature": 1.0, "logprobs": 0}
    body = json.dumps({"token_ids": list(range(5, 69)), "sampling_params": sampling}).encode()

    def ask() -> None:
        while not ended.is_set():
            with _open(url, "/inference/v1/generate", body) as answer:
                answer.read()

    with ThreadPoolExecutor(CALLERS) as callers:
        calls = [callers.submit(ask) for _ in range(CALLERS)]
        try:
            yield
        finally:
            ended.set()
            for call in calls:
                call.result()


def _open(url: str, path: str, body: bytes | None = None) -> Any:
    address = EngineAddress.parse(url)
    headers = address.headers | {"Content-Type": "application/json"}
    return urlopen(Request(f"{address.url}{path}", body, headers))


def _adapter_reports(model: Path, rounds: int) -> dict[str, list[SyncReport]]:
    reports = {}
    with _serving(model, lora_rank=max(RANKS)) as url:
        for rank in RANKS:
            tensors, settings = _adapter(model, rank)
            adapters = AdapterSync(EngineControl([url]), model / "adapters", f"rank-{rank}")
            pushed = [adapters.push(tensors, settings, each) for each in range(1, 2 + rounds)]
            reports[f"its adapter of rank {rank}"] = pushed[1:]
            adapters.close()
    return reports


def _adapter(model: Path, rank: int) -> tuple[list[Named], dict[str, Any]]:
    """A new adapter on all linear layers of the model, and its configuration."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(plain, LoraConfig(r=rank, target_modules="all-linear"))
    return list(adapter_tensors(adapted)), adapter_config(adapted)


@contextmanager
def _serving(model: Path, dtype: str = "float32", **settings: Any) -> Iterator[str]:
    """A vLLM server on the model, by its URL."""
    config = VllmConfig(max_context_tokens=256, args=("--skip-tokenizer-init",), **settings)
    with asyncio.Runner() as runner:
        server = VllmServer(config, model, log=model / "vllm.log", dtype=dtype)
        runner.run(server.start())
        try:
            yield server.url
        finally:
            runner.run(server.stop())


def _sent(name: str, reports: list[SyncReport], size_bytes: int, copy: Cost) -> str:
    """The row of several updates, of a model of `size_bytes` that takes `copy` to copy."""
    paused = min(report.paused_s for report in reports) * 1e3
    total = min(report.total_s for report in reports) * 1e3
    sent = reports[0].size_bytes
    return (
        f"| {name} | {sent} | {sent / size_bytes:.2%} | {paused:.1f} ms | {total:.1f} ms "
        f"| {paused / copy.wall_ms:.1f} |"
    )


def _save_model(path: Path, megabytes: int) -> Any:
    """Saves a Qwen3 with random weights of about this size, and returns it."""
    layer = 4 * 1024 * (4 * 1024 + 3 * 3072)
    settings = Qwen3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, (megabytes << 20) // layer),
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(path)
    return model


if __name__ == "__main__":
    main()
