"""What a vLLM with several workers leaves behind when all of its processes and its run's are killed
is removed at the start of the next one. One that ends leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engines.vllm_server import VllmConfig, VllmServer, socket_folder
from proxy.machine.swept_folder import SHARED_MEMORY, memory_prefix, sweep
from tests.processes import assert_all_end, descendants, watched

pytestmark = [pytest.mark.engine, pytest.mark.long]

RUN = """
import asyncio, sys
from pathlib import Path
from tests.e2e.test_engine_leftovers import new_server

async def run():
    server = new_server(Path(sys.argv[1]), Path(sys.argv[2]))
    await server.start()
    print("runs", flush=True)
    await server.wait()

asyncio.run(run())
"""


def new_server(model: Path, log: Path) -> VllmServer:
    workers = "--tensor-parallel-size", "2"
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    config = VllmConfig(max_context_tokens=64, max_sequences=2, args=workers, env=env)
    return VllmServer(config, model, log=log, dtype="float32")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this test alone; the path of a Unix socket must be short."""
    with tempfile.TemporaryDirectory(prefix="left-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def memory_of(folder: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(memory_prefix(folder) + "*"))


def kill_all(pid: int) -> None:
    """The process and all below it, none of which can clean up after another one's death."""
    family = [pid, *descendants(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in family:
            os.kill(each, number)


def test_files_of_killed_vllm_are_swept_at_the_next_start(
    tiny_model: Path, temporary: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", RUN, str(tiny_model), str(tmp_path / "killed.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "runs\n"
        (folder,) = socket_folder().iterdir()
        memory = memory_of(folder)
        assert memory
        sweep("", socket_folder())  # as at the start of another run
        assert memory_of(folder) == memory
        below = watched(run.pid)
        kill_all(run.pid)
    assert_all_end(below)
    assert len(list(folder.iterdir())) > 1  # with the lock
    assert memory_of(folder)
    server = new_server(tiny_model, tmp_path / "next.log")
    with asyncio.Runner() as runner:
        runner.run(server.start())
        (own,) = socket_folder().iterdir()
        assert own != folder
        assert memory_of(own)
        assert not memory_of(folder)
        runner.run(server.stop())
    assert not memory_of(own)
    assert [file for file in temporary.rglob("*") if file != socket_folder()] == []
