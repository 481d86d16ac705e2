"""Other projects' proxies, each installed into a folder of its own under `cache`.

Each is started with what its documentation recommends for one machine, and with what it needs to
record where it can.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.proxy.targets import Target, first_line, started, until_healthy
from proxy.machine.port import free_port

LITELLM = "litellm[proxy]==1.106.2"
PORTKEY = "@portkey-ai/gateway@1.15.2"
VLLM_ROUTER = "vllm-router==0.1.17"
RLLM_GATEWAY = "rllm-model-gateway==0.1.0"
AGENT_LIGHTNING = "agentlightning==0.3.0"
_KEY = "sk-bench"
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": _KEY}
"""Without the first, LiteLLM downloads prices from GitHub when it is imported. Without the second
it does not start."""


@contextmanager
def litellm(upstream: str, cache: Path) -> Iterator[Target]:
    """LiteLLM with one worker."""
    program, port = _installed(cache, LITELLM, "litellm"), free_port("127.0.0.1")
    model = {"model": "openai/fake", "api_base": f"{upstream}/v1", "api_key": "none"}
    config = cache / "litellm.yaml"
    config.write_text(
        json.dumps({"model_list": [{"model_name": "fake", "litellm_params": model}]}),
        encoding="utf-8",
    )
    argv = [program, "--config", str(config), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--telemetry", "False"]
    with started(argv, **_OFFLINE) as process:
        until_healthy(f"http://127.0.0.1:{port}/health/liveliness", process)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        yield Target("LiteLLM", url, process, {"Authorization": f"Bearer {_KEY}"})


@contextmanager
def portkey(upstream: str, cache: Path) -> Iterator[Target]:
    """Portkey's gateway from npm."""
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
    with started(["node", str(server), f"--port={port}", "--headless"]) as process:
        until_healthy(f"http://127.0.0.1:{port}/", process)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        yield Target("Portkey gateway", url, process, headers)


@contextmanager
def vllm_router(upstream: str, cache: Path) -> Iterator[Target]:
    """vLLM's router in Rust, with one worker and without tries after errors."""
    program, port = _installed(cache, VLLM_ROUTER, "vllm-router"), free_port("127.0.0.1")
    argv = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream]
    argv += ["--policy", "round_robin", "--prometheus-port", str(free_port("127.0.0.1"))]
    with started([*argv, "--disable-retries"]) as process:
        until_healthy(f"http://127.0.0.1:{port}/health", process)
        yield Target("vllm-router", f"http://127.0.0.1:{port}/v1/chat/completions", process)


@contextmanager
def rllm_gateway(upstream: str, cache: Path, scratch: Path) -> Iterator[Target]:
    """rLLM's gateway with its SQLite store."""
    program = _installed(cache, RLLM_GATEWAY, "rllm-model-gateway")
    port = free_port("127.0.0.1")
    file = scratch / f"traces-{port}.sqlite"
    argv = [program, "--host", "127.0.0.1", "--port", str(port), "--worker", f"{upstream}/v1"]
    with started([*argv, "--store", "sqlite", "--db-path", str(file)]) as process:
        until_healthy(f"http://127.0.0.1:{port}/health", process)
        url = f"http://127.0.0.1:{port}/sessions/@S@/v1/chat/completions"
        yield Target("rLLM gateway", url, process, kept=lambda: _traced_sessions(file))


async def _traced_sessions(file: Path) -> set[str]:
    connection = sqlite3.connect(file)
    try:
        return {row[0] for row in connection.execute("SELECT session_id FROM trace_sessions")}
    finally:
        connection.close()


@contextmanager
def agent_lightning(upstream: str, cache: Path) -> Iterator[Target]:
    """Agent Lightning's LLM proxy with its store in memory, and all calls in one rollout."""
    python = _installed(cache, AGENT_LIGHTNING, "python")
    script = Path(__file__).with_name("agent_lightning.py")
    argv = [python, str(script), upstream, str(free_port("127.0.0.1"))]
    with started(argv, subprocess.PIPE, **_OFFLINE) as process:
        url = first_line(process)
        yield Target("Agent Lightning", url, process, {"Authorization": f"Bearer {_KEY}"})


def _installed(cache: Path, package: str, program: str) -> str:
    """The path of a program of a package from PyPI, in a virtual environment of its own."""
    venv = cache / package.partition("==")[0].partition("[")[0]
    if not (venv / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-qq", package], check=True)
        (venv / ".ready").touch()
    return str(venv.absolute() / "bin" / program)
