"""Rows of `benchmarks.gpu.card` for which a real vLLM serves.

- *start*: seconds until a vLLM server of the row's shape is healthy; then its caches are warm.
- *answers*: answers per second through our recording proxy, and those of the same vLLM alone, under
  the load of `vllm bench serve`, in turns.
- *first trial*: seconds from `agentic-train` to the first token of the quickstart's first trial.
- *vllm serve*: seconds until a bare `vllm serve`, with the arguments and variables of the
  quickstart's engine, answers its first call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import start as starts
from benchmarks.gpu.wide_model import STARTER
from benchmarks.proxy import targets
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_platform import installed
from proxy.engines.vllm_server import (
    VllmConfig,
    VllmServer,
    server_arguments,
    server_environment,
)
from proxy.machine.port import free_port
from trainer.cluster.device_plan import fitted, gpus_here, plan_devices
from trainer.cluster.replica_server import replica_engine
from trainer.settings.sources import load

CONTEXT_TOKENS = 2048
"""Of the starter model, whose tokenizer all shapes have here."""
ROUNDS = 3
"""Of measurements in turns, after one that warms up."""
POLL_S = 0.05
OURS = ("--middleware",)
"""Arguments of our servers, each with a value, that name our own code."""


def started(sizes: Mapping[str, int], device: str, folder: Path) -> dict[str, Any]:
    """Seconds until the server is healthy."""

    async def show() -> float:
        began = time.perf_counter()
        async with _server(sizes, device, folder):
            return time.perf_counter() - began

    return {"seconds": asyncio.run(show())}


def answers(sizes: Mapping[str, int], device: str, folder: Path) -> dict[str, Any]:
    """Answers/s of the server alone and through the proxy, and their ratio."""
    found = asyncio.run(_answers(_server(sizes, device, folder), folder, small=device == "cpu"))
    medians = {name: median(each[1:]) for name, each in found.items()}
    return {
        **{f"answers/s {name}": value for name, value in medians.items()},
        "÷": medians["through the proxy"] / medians["alone"],
    }


def first_trial(device: str) -> dict[str, Any]:
    """Seconds from the command to the first sampled token, and processor time until then."""
    seconds, cpu_s = starts.start(starts.HERE, f"trainer.device={device}")
    return {"seconds": seconds, "CPU s": cpu_s}


def bare_serve(device: str, folder: Path) -> dict[str, Any]:
    """Seconds until `vllm serve` answers, as the quickstart's engine would be started by itself."""
    config = load([starts.HERE / "agentic_trainer.yaml"], [f"trainer.device={device}"])
    config = fitted(config, gpus_here())
    engine, plan = replica_engine(config), plan_devices(config, gpus_here())
    if plan is not None:
        engine = plan.engine_config(engine, 0, "")
    dtype, port = engine.served_dtype(config.model), free_port("127.0.0.1")
    model = str(config.model.path)
    program = [str(Path(sys.executable).with_name("vllm")), "serve", model]
    if installed().device == "cpu":  # whose build has another name, which that program looks for
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command = [
        *(*program, "--dtype", dtype, "--seed", str(config.trainer.seed)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *_without(OURS, server_arguments(engine)),
    ]
    environment = server_environment(engine, dtype)
    log, began = folder / "vllm.log", time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=starts.HERE, env=environment, stdout=output, stderr=output
        )
    try:
        while not _answers_at(port, model):
            if process.poll() is not None:
                raise SystemExit(f"vllm serve ended:\n{log.read_text('utf-8', 'replace')[-3000:]}")
            time.sleep(POLL_S)
        return {"seconds": time.perf_counter() - began}
    finally:
        process.terminate()
        process.wait()


def _server(sizes: Mapping[str, int], device: str, folder: Path) -> VllmServer:
    """Of a model with random weights of these sizes, and the starter model's vocabulary."""
    model = folder / "model"
    shutil.copytree(STARTER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = AutoConfig.from_pretrained(STARTER)
    for name, value in sizes.items():
        setattr(settings, name, value)
    settings.layer_types = ["full_attention"] * settings.num_hidden_layers
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(settings, dtype=dtype).save_pretrained(model)
    config = VllmConfig(max_context_tokens=CONTEXT_TOKENS)
    name = str(dtype).removeprefix("torch.")
    return VllmServer(config, model, log=folder / "vllm.log", dtype=name)


async def _answers(server: VllmServer, folder: Path, *, small: bool) -> dict[str, list[float]]:
    """Answers/s by round; prompts differ from all others, so that no cache has them."""
    starting = asyncio.create_task(server.start())
    load = await asyncio.to_thread(_load_of_vllm)  # its imports take as long as those of the server
    found: dict[str, list[float]] = {"alone": [], "through the proxy": []}
    size = (8, 8, 64, 16) if small else (512, 64, 1024, 128)
    try:
        await starting
        address = EngineAddress.parse(server.url)
        with targets.ours(server.url, folder) as proxy:
            ways = {
                "alone": (address.url, address.headers),
                "through the proxy": (proxy.origin, {}),
            }
            for seed, (name, (url, headers)) in enumerate(list(ways.items()) * (ROUNDS + 1)):
                url = url if headers else f"{url}/s{seed}"  # a session for each load
                found[name].append(await load(folder / "model", url, headers, size, seed))
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await server.stop()
    return found


def _load_of_vllm() -> Any:
    """`vllm bench serve` as a function, so that it is imported once."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)

    async def answers_per_s(
        model: Path, url: str, headers: Mapping[str, str], size: tuple[int, ...], seed: int
    ) -> float:
        count, at_a_time, prompt, answer = map(str, size)
        words = [
            *("--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"),
            *("--model", str(model), "--dataset-name", "random", "--num-prompts", count),
            *("--random-input-len", prompt, "--random-output-len", answer),
            *("--max-concurrency", at_a_time, "--temperature", "1", "--seed", str(seed)),
            # which that load sets for prompts like these, and the proxy refuses
            *("--extra-body", '{"ignore_eos": false}', "--disable-tqdm"),
        ]
        if headers:
            words += ["--header", *(f"{name}={value}" for name, value in headers.items())]
        with contextlib.redirect_stdout(sys.stderr):
            result = await main_async(parser.parse_args(words))
        if result["completed"] != size[0]:
            raise SystemExit(
                f"{result['completed']} of {count} calls of {url} were answered: "
                f"{_refusal(f'{url}/v1/chat/completions', headers, str(model))}"
            )
        return float(result["request_throughput"])

    return answers_per_s


def _refusal(url: str, headers: Mapping[str, str], model: str) -> str:
    """What is answered to one such call; the load of vLLM keeps no bodies."""
    asked = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    given = {"Content-Type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), given)):
            return "another call is answered"
    except urllib.error.HTTPError as error:
        return f"{error} {error.read().decode(errors='replace')}"


def _without(names: tuple[str, ...], arguments: list[str]) -> Iterator[str]:
    given = iter(arguments)
    for each in given:
        if each in names:
            next(given)
        else:
            yield each


def _answers_at(port: int, model: str) -> bool:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
