"""Agents in tasks of a real Ray cluster, whose nodes are processes on this machine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import LaunchError
from agent_loop.extras.ray import launcher as ray_task
from agent_loop.extras.ray.launcher import RayConfig, RayLauncher
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Task, Trial
from agent_loop.remote_agent_config import RemoteAgentConfig
from proxy import wall
from proxy.machine import landlock
from proxy.wall import Wall
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.launchers.test_command import until
from tests.needs import skip_or_fail

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without room for agents, and one node with one core."""
    config = {
        "worker_register_timeout_seconds": 300,
        "worker_niceness": 0,
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 1000,
    }
    with ExitStack() as stack:
        # The paths of Ray's sockets would be too long in pytest's temporary folders.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster()
        stack.callback(nodes.shutdown)
        nodes.add_node(**(NODE | {"num_cpus": 0}), _system_config=config)
        nodes.add_node(**NODE, resources={"agents": 1})
        stack.callback(ray.shutdown)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes


@pytest.fixture
def make_trial(tmp_path: Path) -> MakeTrial:
    """Trials with directories of their own."""
    numbers = count(1)

    def make(timeout_s: float = 120.0, **data: object) -> Trial:
        name = f"t-{next(numbers)}"
        (tmp_path / name).mkdir()
        return Trial(
            trial_id=name,
            task=Task("task", {"prompt": "do it", **data}),
            base_url="http://127.0.0.1:9/v1",
            api_key=f"key-of-{name}",
            model="policy",
            directory=tmp_path / name,
            timeout_s=timeout_s,
        )

    return make


async def run(
    trial: Trial, script: str, process: ProcessConfig = PROCESS, **settings: Any
) -> AgentResult:
    defaults = {"resources": {"agents": 0.5}, "num_cpus": 0.5}
    config = RayConfig(argv=("sh", "-c", script), **(defaults | settings))
    launcher = RayLauncher(config, process)
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


def processes(trial: Trial) -> list[int]:
    """Ids of the processes, on any node, that have the key of the trial's session."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if trial.api_key.encode() + b"\0" in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def workers(trial: Trial) -> set[int]:
    """Ids of Ray's workers that have started the trial's processes: worker, server, supervisor,
    agent."""
    found = set()
    for pid in processes(trial):
        for _ in range(3):
            status = Path(f"/proc/{pid}/status").read_text()
            pid = int(status.split("PPid:")[1].split()[0])
            if Path(f"/proc/{pid}/comm").read_text().startswith("ray::"):
                found.add(pid)
    return found


@pytest.mark.slow
async def test_agent_on_a_node_is_like_one_on_this_machine(
    nodes: Any, make_trial: MakeTrial, tmp_path: Path
) -> None:
    """One test for one start of Ray: the environment, the log, the working directory, the end at
    the deadline, a cancellation, and a node without room."""
    trial = make_trial(question="2+2", answer="4")
    trial = replace(trial, hidden_fields=frozenset({"answer"}))
    code = 'echo "$AGENT_MODEL"; cat "$TASK_FILE"; echo done > made; exit 3'
    result = await run(trial, code, memory_bytes=2**20, workspace_bytes=1000)
    assert (result.end, result.error) == (AgentEnd.CRASHED, "exit code 3")
    model, _, task = (trial.directory / "agent.log").read_text().partition("\n")
    assert model == trial.model
    assert json.loads(task) == trial.agent_data
    assert (trial.workspace / "made").read_text() == "done\n"

    late = await run(make_trial(timeout_s=0.5), "sleep 600", ProcessConfig(grace_s=0.1))
    assert late.end is AgentEnd.TIMED_OUT

    for suspended in (False, True):
        alive = tmp_path / f"alive-{suspended}"
        trial = make_trial()
        code = f"trap '' TERM; touch {alive}; sleep 600 & wait; sleep 600"
        running = asyncio.create_task(run(trial, code, ProcessConfig(grace_s=0.1)))
        await until(alive.exists)
        (worker,) = workers(trial)
        os.kill(worker, signal.SIGSTOP if suspended else signal.SIGCONT)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not processes(trial)
        os.kill(worker, signal.SIGCONT)

    alive, trial = tmp_path / "alive-lost", make_trial()
    lost = asyncio.create_task(run(trial, f"touch {alive}; sleep 600"))
    await until(alive.exists)
    (worker,) = workers(trial)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(LaunchError, match="the agent was lost with its worker or its node"):
        await lost
    assert not processes(trial)

    with pytest.raises(LaunchError, match=r"left 2000 bytes .* at most 1000 are copied back"):
        await run(make_trial(), "head -c 2000 /dev/zero > f", workspace_bytes=1000)

    with pytest.raises(LaunchError, match=r"no node had room for .*'agents': 2.* within 0 s|1 s"):
        await run(make_trial(), "true", resources={"agents": 2}, room_timeout_s=0.5)


@pytest.mark.long
async def test_lost_node_fails_the_trial_as_our_fault_and_the_next_one_runs(
    nodes: Any, make_trial: MakeTrial, tmp_path: Path
) -> None:
    second = nodes.add_node(**NODE, resources={"second": 1})
    alive = tmp_path / "alive"
    code = f"touch {alive}; sleep 600"
    trial = make_trial()
    running = asyncio.create_task(run(trial, code, resources={"second": 1}))
    await until(alive.exists)
    nodes.remove_node(second, allow_graceful=False)
    with pytest.raises(LaunchError, match="the agent was lost with its worker or its node"):
        await running
    assert not processes(trial)
    result = await run(make_trial(), "true")
    assert result.end is AgentEnd.EXITED


@pytest.fixture
def load() -> Iterator[None]:
    """More work than this machine has cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for each in busy:
        each.kill()
        each.wait()


@pytest.mark.long
@pytest.mark.usefixtures("load")
async def test_agents_cancelled_at_any_moment_have_ended(nodes: Any, make_trial: MakeTrial) -> None:
    """Queued, starting, running and ended."""
    trials = [make_trial() for _ in range(30)]
    for number, trial in enumerate(trials):
        running = asyncio.create_task(run(trial, "sleep 0.3"))
        await asyncio.wait([running], timeout=0.04 * number)
        running.cancel()
        await asyncio.wait([running])
        assert not processes(trial)
    # Tasks start in order: whatever Ray still starts has started before this one ends.
    await run(make_trial(), "true", resources={"agents": 1}, num_cpus=1)
    assert not [trial for trial in trials if processes(trial)]


def test_working_directory_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"0" * 2000)
    with pytest.raises(LaunchError, match=r"2000 bytes .* at most 1000 are copied back; raise"):
        ray_task._packed(tmp_path, 1000)


def test_what_leads_out_of_the_working_directory_does_not_end_the_trial(tmp_path: Path) -> None:
    work, back = tmp_path / "work", tmp_path / "back"
    work.mkdir()
    (work / "link").symlink_to("/etc/passwd")
    (work / "up").symlink_to("../secret")
    os.mkfifo(work / "pipe")
    (work / "answer").write_text("42")
    packed = ray_task._packed(work, 1000)
    assert tarfile.is_tarfile(io.BytesIO(packed))
    ray_task._unpack(packed, back)
    assert [path.name for path in back.iterdir()] == ["answer"]


def test_node_that_does_not_hold_the_wall_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landlock, "missing", lambda: "this kernel has no Landlock")
    monkeypatch.setattr(landlock, "missing_scopes", lambda: None)
    monkeypatch.setattr(wall, "missing_processes", lambda: None)
    monkeypatch.setattr(wall, "missing", lambda: None)
    wanted = Wall(hide=("/secret",), ports=frozenset({29500}))
    with pytest.raises(LaunchError, match=r'no Landlock.*sandbox="light without ports"'):
        ray_task._wall_of_node(wanted, "http://127.0.0.1:9/v1")
    accepting = replace(wanted, accepted=frozenset({"ports"}))
    behind = ray_task._wall_of_node(accepting, "http://127.0.0.1:9/v1")
    assert behind == replace(accepting, ports=frozenset())
    monkeypatch.setattr(wall, "missing", lambda: "Operation not permitted")
    with pytest.raises(LaunchError, match=r"not permitted\); allow .*remote_agent\.sandbox=off"):
        ray_task._wall_of_node(accepting, "http://127.0.0.1:9/v1")


def test_start_says_that_nodes_build_the_walls() -> None:
    agent = {"ray": {"argv": ["true"]}}
    walled = RemoteAgentConfig.model_validate(agent).sandbox_warning or ""
    assert "each node builds the wall of its agents" in walled
    off = RemoteAgentConfig.model_validate({**agent, "sandbox": "off"}).sandbox_warning or ""
    assert off.startswith("warning: remote_agent.sandbox=off: agents can read what Ray's user")
