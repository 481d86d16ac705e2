"""Worker processes that end during their start, simulated by a small program."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from proxy.config import ProxyConfig
from proxy.errors import ConfigurationError
from proxy.extras.several_processes import workers

STAND_IN = """
import os, pathlib, signal, sys
starts = pathlib.Path(sys.argv[1])
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count < int(sys.argv[2]):
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[3]))
print("listening", flush=True)
sys.stdin.buffer.read()
"""


async def serve(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, failures: int, how: str
) -> tuple[int, bool]:
    """Runs a worker whose first starts fail; returns their number and whether it listened."""
    starts = folder / "starts"
    command = (sys.executable, "-c", STAND_IN, str(starts), str(failures), how)
    monkeypatch.setattr(workers, "WORKER", command)
    monkeypatch.setattr(workers, "RESTART_DELAY_S", 0.001)
    stop, listened = asyncio.Event(), asyncio.Event()

    def listening(config: ProxyConfig, url: str) -> None:
        listened.set()
        stop.set()

    try:
        async with asyncio.timeout(30):
            await workers.serve_workers(ProxyConfig(port=0, workers=1), stop, listening)
    finally:
        count = len(starts.read_text())
    return count, listened.is_set()


async def test_worker_killed_during_its_start_is_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await serve(monkeypatch, tmp_path, failures=2, how="killed") == (3, True)


def test_worker_that_ends_before_it_gets_its_part_is_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_and_lose(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        child = await start(*argv, **options)
        if to_kill:
            to_kill.pop()
            child.kill()
            await child.wait()
        return child

    to_kill = [1, 2]
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_lose)
    # uvloop, as in `agentic-proxy serve`: it refuses to write to a process that has ended.
    started, listened = uvloop.run(serve(monkeypatch, tmp_path, failures=0, how=""))
    assert (started >= 1, listened) == (True, True)


async def test_worker_that_keeps_failing_to_start_ends_the_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"ended 5 times in a row .* code -9"):
        await serve(monkeypatch, tmp_path, failures=99, how="killed")
    assert (tmp_path / "starts").read_text() == "x" * workers.MAX_FAILED_STARTS


async def test_worker_that_has_listened_is_restarted_however_often_it_fails_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failures = 2 * workers.MAX_FAILED_STARTS
    starts = tmp_path / "starts"
    once = "if not starts.exists(): starts.write_text(''); print('listening', flush=True); exit()"
    listens_first = STAND_IN.replace("count = ", f"{once}\ncount = ")
    command = (sys.executable, "-c", listens_first, str(starts), str(failures), "killed")
    monkeypatch.setattr(workers, "WORKER", command)
    monkeypatch.setattr(workers, "RESTART_DELAY_S", 0.001)
    stop = asyncio.Event()
    config = ProxyConfig(port=0, workers=1)
    serving = asyncio.create_task(workers.serve_workers(config, stop, lambda *_: None))
    async with asyncio.timeout(60):
        while len(starts.read_text() if starts.exists() else "") <= failures:
            assert not serving.done()
            await asyncio.sleep(0.01)
    stop.set()
    await serving


async def test_invalid_configuration_ends_the_proxy_at_the_first_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="see its message above"):
        await serve(monkeypatch, tmp_path, failures=99, how="2")
    assert (tmp_path / "starts").read_text() == "x"


@pytest.mark.parametrize("when", ["before it gets its part", "before it listens"])
def test_worker_whose_parent_was_killed_ends_without_a_traceback(
    when: str, checkpoint: Path, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/sessions.db"
    config = ProxyConfig(model=checkpoint, port=0, store=store, admin_key="key")
    part = workers.WorkerPart(config, tmp_path / "own.socket", (), 0, ())
    sent = b"" if when == "before it gets its part" else pickle.dumps(part)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            workers.WORKER, input=sent, stdout=write_end, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(write_end)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr, done.stderr
