"""Servers that start before it is known what they serve; a stand-in takes vLLM's place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engines import vllm_early, vllm_platform
from proxy.engines.vllm_early import EarlyServer
from proxy.engines.vllm_launch import MODULE, EarlyOrders
from proxy.engines.vllm_platform import CPU, GPU
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import EngineError
from tests.processes import assert_all_end, command_line, descendants, watched

STAND_IN = """
import json, os, signal, sys
print("imported")
if __name__ != "__main__" and os.environ.get("IMPORTED"):
    open(os.environ["IMPORTED"], "w").close()
if os.environ.get("BROKEN"):
    raise ImportError("no such engine")
if __name__ == "__main__":
    from proxy.engines.vllm_key import RequireKey
    reported = os.environ.get("REPORTED", "VLLM_CPU_KVCACHE_SPACE")
    told = [sys.argv[1:], RequireKey.key, os.environ.get(reported)]
    print("serves", flush=True)
    with open(os.environ["TOLD"], "w") as fifo:
        json.dump(told, fifo)
    signal.pause()
"""
GUARD_AND_SERVER = 2
PLATFORMS = """
class current_platform:
    is_cpu = is_unspecified = staticmethod(lambda: False)
"""


@pytest.fixture
def imported(environment: dict[str, str], tmp_path: Path) -> Path:
    """A FIFO whose end is reached when a server has imported vLLM."""
    os.mkfifo(tmp_path / "imported")
    environment["IMPORTED"] = str(tmp_path / "imported")
    return tmp_path / "imported"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a server whose vLLM is the stand-in."""
    module = tmp_path / "path" / (MODULE.replace(".", "/") + ".py")
    module.parent.mkdir(parents=True)
    for package in module.relative_to(tmp_path / "path").parents:
        (tmp_path / "path" / package / "__init__.py").touch()
    module.write_text(STAND_IN)
    (tmp_path / "path" / "vllm" / "platforms.py").write_text(PLATFORMS)
    os.mkfifo(tmp_path / "told")
    ours = {"PYTHONPATH": str(tmp_path / "path"), "TOLD": str(tmp_path / "told")}
    yield {**ours, "VLLM_CPU_KVCACHE_SPACE": "1"}
    vllm_early.end_all()


def orders(log: Path, environment: dict[str, str]) -> EarlyOrders:
    arguments = ["--model", "m"]
    return EarlyOrders(key="the key", arguments=arguments, environment=environment, log=str(log))


async def test_early_server_learns_what_it_serves_and_logs_everything(
    environment: dict[str, str], tmp_path: Path
) -> None:
    vllm_early.begin(1, environment, grace_s=5.0)
    wanted = environment | {"VLLM_CPU_KVCACHE_SPACE": "4"}
    early = vllm_early.taken(wanted, CPU.late)
    assert early is not None
    log = tmp_path / "engine.log"
    early.order(orders(log, wanted))
    told = await asyncio.to_thread((tmp_path / "told").read_text)
    assert json.loads(told) == [["--model", "m"], "the key", "4"]
    assert log.read_text().split() == ["imported", "imported", "serves"]  # as itself at last
    assert early.returncode is None
    early.stdin.close()
    assert await early.wait() == 128 + signal.SIGTERM


async def test_key_and_arguments_are_on_no_command_line_of_an_early_server(
    environment: dict[str, str], tmp_path: Path
) -> None:
    early = EarlyServer(environment, grace_s=5.0)
    log = tmp_path / "engine.log"
    early.order(orders(log, environment))
    await asyncio.to_thread((tmp_path / "told").read_text)
    (server,) = descendants(early.pid)
    assert "the key" not in command_line(server)
    early.end()


def test_server_is_taken_whatever_this_process_has_set_since(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (early,) = vllm_early.begin(1, environment, grace_s=5.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/set-while-torch-was-imported")
    assert vllm_early.taken(environment) is early
    early.end()


async def test_early_server_on_gpus_is_taken_and_learns_which_are_its_own(
    environment: dict[str, str], tmp_path: Path
) -> None:
    del environment["VLLM_CPU_KVCACHE_SPACE"]
    (begun,) = vllm_early.begin(1, environment, grace_s=5.0)
    exact = GPU.server_environment("float32", None) | {"CUDA_VISIBLE_DEVICES": "3"}
    wanted = environment | {name: exact[name] for name in exact.keys() & GPU.late}
    early = vllm_early.taken(wanted, GPU.late)
    assert early is begun
    early.order(orders(tmp_path / "engine.log", wanted | {"REPORTED": "CUDA_VISIBLE_DEVICES"}))
    told = await asyncio.to_thread((tmp_path / "told").read_text)
    assert json.loads(told)[2] == "3"
    early.end()


def test_variable_cannot_be_taken_back_from_an_early_server(environment: dict[str, str]) -> None:
    vllm_early.begin(1, environment | {"CUDA_VISIBLE_DEVICES": "0"}, grace_s=5.0)
    assert vllm_early.taken(environment, GPU.late) is None


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH"])
def test_server_with_another_environment_is_ended_and_not_taken(
    environment: dict[str, str], imported: Path, name: str
) -> None:
    (early,) = vllm_early.begin(1, environment, grace_s=5.0)
    imported.read_text()
    running = watched(early.pid)
    assert len(running) == 1
    assert vllm_early.taken(environment | {name: "7"}, CPU.late | GPU.late) is None
    assert early.returncode is not None
    assert_all_end(running)
    assert vllm_early.taken(environment) is None


def test_servers_that_nobody_took_are_ended(environment: dict[str, str], imported: Path) -> None:
    (early,) = vllm_early.begin(1, environment, grace_s=5.0)
    imported.read_text()
    (another,) = vllm_early.begin(1, environment, grace_s=5.0)  # may not even run yet
    running = watched(early.pid)
    assert len(running) == 1
    vllm_early.end_all()
    assert None not in (early.returncode, another.returncode)
    assert_all_end(running)


async def test_import_that_fails_is_in_the_log_and_in_the_exit_code(
    environment: dict[str, str], tmp_path: Path
) -> None:
    broken = environment | {"BROKEN": "1"}
    early = EarlyServer(broken, grace_s=5.0)
    log = tmp_path / "engine.log"
    early.order(orders(log, broken))
    assert await early.wait() == 1
    early.stdin.close()
    assert "ImportError: no such engine" in log.read_text()


async def test_server_that_is_killed_before_it_has_a_log_is_an_error_of_the_engine(
    environment: dict[str, str], imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyServer(environment, grace_s=5.0)
    imported.read_text()
    (server,) = descendants(early.pid)
    os.kill(server, signal.SIGKILL)  # as when the machine has no memory left
    monkeypatch.setattr(vllm_early, "taken", lambda asked, late: early)
    monkeypatch.setattr(vllm_platform, "installed", lambda: CPU)
    (tmp_path / "config.json").touch()
    with pytest.raises(EngineError, match=r"did not start \(exit code 137\): its log is empty"):
        await VllmServer(VllmConfig(), tmp_path, log=tmp_path / "logs" / "engine.log").start()


async def test_server_of_a_run_that_gives_way_itself_does_not_go_before_its_agents(
    environment: dict[str, str],
    imported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = EarlyServer(environment, grace_s=5.0)
    imported.read_text()
    (process,) = descendants(early.pid)
    os.setpriority(os.PRIO_PROCESS, process, 19)  # inherited from `nice -n 19 agentic-trainer`
    monkeypatch.setattr(vllm_platform, "installed", lambda: CPU)
    (tmp_path / "config.json").touch()
    server = VllmServer(VllmConfig(), tmp_path, log=tmp_path / "engine.log")
    server._process = early
    server._give_way(10)
    assert os.getpriority(os.PRIO_PROCESS, process) == 19
    early.end()


def test_server_that_died_while_it_waited_is_not_taken(
    environment: dict[str, str], imported: Path
) -> None:
    (early,) = vllm_early.begin(1, environment, grace_s=5.0)
    imported.read_text()
    os.kill(early.pid, signal.SIGTERM)
    os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    assert vllm_early.taken(environment) is None


def test_early_server_ends_with_a_killed_parent(
    environment: dict[str, str], imported: Path
) -> None:
    begin = "import os, signal; from proxy.engines import vllm_early as e\n"
    begin += "e.begin(1, {}, 5.0); signal.pause()"
    whole = {**os.environ, **environment}
    parent = subprocess.Popen([sys.executable, "-c", begin], env=whole)
    imported.read_text()
    running = watched(parent.pid)
    assert len(running) == GUARD_AND_SERVER
    parent.kill()
    parent.wait()
    assert_all_end(running)
