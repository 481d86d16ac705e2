"""A real vLLM process: it reports why it does not start, and it ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_launch import fork_processes
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import ConfigurationError, EngineError

pytestmark = pytest.mark.engine

STARTER = """
import asyncio, sys
from pathlib import Path
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmConfig, VllmServer

server = VllmServer(VllmConfig(max_context_tokens=256), Path(sys.argv[1]), log=Path(sys.argv[2]))
asyncio.run(server.start())
"""


async def test_server_that_dies_at_start_reports_its_reason_in_one_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = VllmConfig(args=("--no-such-flag",))
    server = VllmServer(config, tiny_model, log=tmp_path / "vllm.log")
    with pytest.raises(EngineError, match=r"exit code 2.*--no-such-flag.*vllm\.log") as died:
        await server.start()
    assert "\n" not in died.value.message
    assert not server.running


def test_model_that_is_not_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"empty has no config\.json"):
        VllmServer(VllmConfig(), tmp_path / "empty", log=tmp_path / "vllm.log")


def test_port_in_use_is_refused_by_number(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"engine port={port}: .*in use"):
            VllmServer(VllmConfig(), tiny_model, log=tmp_path / "vllm.log", port=port)


async def test_processes_of_a_vllm_on_a_cpu_are_forked_and_get_signals_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils import system_utils

    monkeypatch.setattr(system_utils, "get_mp_context", system_utils.get_mp_context)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # what vLLM sets with a CPU
    assert system_utils.get_mp_context().get_start_method() == "spawn"
    fork_processes()
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, signalled.set)
    context = system_utils.get_mp_context()
    assert context.get_start_method() == "fork"
    forked = context.Process(target=signal.raise_signal, args=(signal.SIGUSR1,))
    forked.start()
    await asyncio.to_thread(forked.join)
    assert forked.exitcode == 0
    assert not signalled.is_set()
    loop.remove_signal_handler(signal.SIGUSR1)


def test_kill_9_of_its_parent_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tiny_model), str(log)]) as parent:
        pids = _wait_for_engine_core(parent.pid, log)
        pidfds = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
        assert all(select.select([fd], [], [], 30)[0] for fd in pidfds)
    assert len(pidfds) >= 3  # the guard, the API server, the engine's core


def _wait_for_engine_core(parent: int, log: Path) -> list[int]:
    """The tree below `parent` once the log shows the engine's own process at work."""
    follow = subprocess.Popen(
        ["tail", "-F", "-n", "+1", str(log)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert follow.stdout is not None
    for line in follow.stdout:
        if b"EngineCore" in line:
            break
    follow.kill()
    follow.wait()
    follow.stdout.close()
    return _descendants(parent)


def _descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return children + [below for child in children for below in _descendants(child)]


def test_processes_of_a_server_give_way_to_others(vllm: VllmServer) -> None:
    assert vllm._process is not None
    _guard, *server = [vllm._process.pid, *_descendants(vllm._process.pid)]
    assert len(server) >= 2  # the API server, the engine's core
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + vllm.config.nice, 19)
    for pid in server:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, each) for each in threads} == {nice}
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():  # a kernel that groups the processes of a session
            assert group.read_text().split()[-1] == str(vllm.config.nice)


def test_no_environment_and_no_command_line_contains_the_key(vllm: VllmServer) -> None:
    key = EngineAddress.parse(vllm.url).key
    assert key
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if key.encode() in (process / name).read_bytes():
                    found.append(process / name)
    assert found == []
