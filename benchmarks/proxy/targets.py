"""The processes that are measured: our proxy, a bare pass-through, and other projects' proxies.

Invariant: the code that starts a target ends all of its processes.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from examples.starter_model.tokenizer import save_tokenizer, train_tokenizer
from proxy.port import free_port

CONTEXT_TOKENS = 200_000
START_TIMEOUT_S = 600.0
"""LiteLLM's imports take half a minute of CPU time, which is minutes on a busy machine."""
LITELLM = "litellm[proxy]==1.106.2"
PORTKEY = "@portkey-ai/gateway@1.15.2"


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    url: str
    """URL of the target's chat completions."""
    process: subprocess.Popen[str]
    headers: dict[str, str] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU time of its whole process tree so far."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        return sum(process_cpu_s(pid) for pid in pids)

    def resident_bytes(self) -> int:
        pids = [self.process.pid, *_descendants(self.process.pid)]
        status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(s.partition("VmRSS:")[2].split()[0]) * 1024 for s in status)


@contextmanager
def fake_vllm(*arguments: str) -> Iterator[str]:
    with _python("benchmarks.proxy.fake_vllm", *arguments) as process:
        yield _first_line(process)


@contextmanager
def pass_through(upstream: str) -> Iterator[Target]:
    with _python("benchmarks.proxy.pass_through", upstream) as process:
        url = f"{_first_line(process)}/v1/chat/completions"
        yield Target("aiohttp pass-through", url, process)


@contextmanager
def ours(upstream: str, folder: Path, *arguments: str) -> Iterator[Target]:
    """Our proxy, with its durable store and sessions by path."""
    model, port = folder / "model", free_port("127.0.0.1")
    if not model.exists():
        write_checkpoint(model)
    argv = ["serve", "--engine", upstream, "--model", str(model), "--port", str(port)]
    store = folder / f"sessions-{port}.sqlite"
    argv += ["--auto-create", "--store", f"sqlite:///{store}", *arguments]
    with _python("proxy", *argv) as process:
        _until_healthy(f"http://127.0.0.1:{port}/health", process)
        name = "ours, 2 workers" if "--workers" in arguments else "ours, recording"
        yield Target(name, f"http://127.0.0.1:{port}/s@S@/v1/chat/completions", process)


@contextmanager
def litellm(upstream: str, cache: Path) -> Iterator[Target]:
    """LiteLLM from PyPI with one worker, in its own virtual environment under `cache`."""
    venv, port = cache / "litellm", free_port("127.0.0.1")
    if not (venv / "bin" / "litellm").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", LITELLM], check=True)
    model = {"model": "openai/fake", "api_base": f"{upstream}/v1", "api_key": "none"}
    config = cache / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "fake", "litellm_params": model}]}))
    argv = [str(venv / "bin" / "litellm"), "--config", str(config), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--telemetry", "False"]
    # Without this, it downloads prices from GitHub when it is imported.
    # Without a master key it does not start.
    key = "sk-bench"
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with _process(argv, **offline) as process:
        _until_healthy(f"http://127.0.0.1:{port}/health/liveliness", process)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        yield Target("LiteLLM", url, process, {"Authorization": f"Bearer {key}"})


@contextmanager
def portkey(upstream: str, cache: Path) -> Iterator[Target]:
    """Portkey's gateway from npm, in its own folder under `cache`."""
    folder, port = cache / "portkey", free_port("127.0.0.1")
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--silent", "--prefix", str(folder), PORTKEY],
            check=True,
        )
    server = folder / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    headers = {
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"{upstream}/v1",
        "Authorization": "Bearer none",
    }
    with _process(["node", str(server), f"--port={port}", "--headless"]) as process:
        _until_healthy(f"http://127.0.0.1:{port}/", process)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        yield Target("Portkey gateway", url, process, headers)


def write_checkpoint(folder: Path) -> None:
    """A tokenizer with 4,096 entries and a context that is long enough for the conversations; no
    weights."""
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(list(pydoc_data.topics.topics.values()), 4096)
    save_tokenizer(tokenizer, folder, CONTEXT_TOKENS)
    config = {"model_type": "qwen3", "max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def _python(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with _process([sys.executable, "-m", module, *arguments]) as process:
        yield process


@contextmanager
def _process(argv: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _until_healthy(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise SystemExit(f"{process.args!r} did not answer at {url}")


def _descendants(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def process_cpu_s(pid: int) -> float:
    """CPU time of all its threads, with a resolution of nanoseconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)
