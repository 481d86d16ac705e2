"""The processes that are measured: our proxy, a bare pass-through, and (`peers.py`) other proxies.

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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from examples.starter_model.tokenizer import save_tokenizer, train_tokenizer
from proxy.machine.port import free_port
from proxy.records import TurnStatus
from proxy.store import open_store
from proxy.store.protocol import SessionFilter

CONTEXT_TOKENS = 200_000
START_TIMEOUT_S = 600.0
"""LiteLLM's imports take half a minute of CPU time, which is minutes on a busy machine."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    url: str
    """URL of the target's chat completions."""
    process: subprocess.Popen[str]
    headers: dict[str, str] = field(default_factory=dict)
    kept: Callable[[], Awaitable[set[str]]] | None = None
    """Reads from the store, when the process has ended, which sessions have a complete answer. None
    if the target has no store that outlives it."""

    @property
    def origin(self) -> str:
        """The URL without its path."""
        address = urlsplit(self.url)
        return f"{address.scheme}://{address.netloc}"

    def cpu_s(self) -> float:
        """CPU time of its whole process tree so far."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        return sum(process_cpu_s(pid) for pid in pids)

    def resident_bytes(self) -> int:
        pids = [self.process.pid, *_descendants(self.process.pid)]
        status = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in pids]
        return sum(int(s.partition("VmRSS:")[2].split()[0]) * 1024 for s in status)


@contextmanager
def fake_vllm(*arguments: str) -> Iterator[str]:
    with _prints_url("benchmarks.proxy.fake_vllm", *arguments) as process:
        yield first_line(process)


@contextmanager
def pass_through(upstream: str) -> Iterator[Target]:
    with _prints_url("benchmarks.proxy.pass_through", upstream) as process:
        url = f"{first_line(process)}/v1/chat/completions"
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
    with started([sys.executable, "-m", "proxy", *argv]) as process:
        until_healthy(f"http://127.0.0.1:{port}/health", process)
        name = "ours, 2 workers" if "--workers" in arguments else "ours, recording"
        name += ", JSON from the engine" if upstream.endswith("/json") else ""
        url = f"http://127.0.0.1:{port}/s@S@/v1/chat/completions"
        yield Target(name, url, process, kept=lambda: _answered_sessions(store))


async def _answered_sessions(file: Path) -> set[str]:
    store = await open_store(f"sqlite:///{file}", create=False)
    try:
        sessions = await store.list_sessions(SessionFilter(limit=1_000_000))
        return {
            session.session_id.removeprefix("s")
            for session in sessions
            for turn in await store.get_turns(session.session_id)
            if turn.status is TurnStatus.DONE
        }
    finally:
        await store.close()


def write_checkpoint(folder: Path) -> None:
    """A tokenizer with 4,096 entries and a context that is long enough for the conversations; no
    weights."""
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(list(pydoc_data.topics.topics.values()), 4096)
    save_tokenizer(tokenizer, folder, CONTEXT_TOKENS)
    config = {"model_type": "qwen3", "max_position_embeddings": CONTEXT_TOKENS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def _prints_url(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", module, *arguments]
    with started(argv, subprocess.PIPE) as process:
        yield process


@contextmanager
def started(
    argv: list[str], stdout: int = subprocess.DEVNULL, /, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`stdout`: PIPE for a program that prints its URL and nothing else. Nobody reads the pipe
    afterwards, so a program that logs would stop as soon as it is full."""
    with subprocess.Popen(
        argv,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        encoding="utf-8",
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


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until_healthy(url: str, process: subprocess.Popen[str]) -> None:
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
        for child in (thread / "children").read_text(encoding="utf-8").split():
            found += [int(child), *_descendants(int(child))]
    return found


def process_cpu_s(pid: int) -> float:
    """CPU time of all its threads, with a resolution of nanoseconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)
