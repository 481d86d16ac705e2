"""Agents in tasks of a real Ray cluster, whose nodes are processes on this machine."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import LaunchError
from agent_loop.launchers import ray_task
from agent_loop.launchers.ray_task import RayConfig, RayLauncher
from agent_loop.records import AgentEnd, Task, Trial
from tests.agent_loop.conftest import MakeTrial
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


def launcher(script: str, **settings: Any) -> RayLauncher:
    defaults = {"resources": {"agents": 0.5}, "num_cpus": 0.5}
    return RayLauncher(RayConfig(argv=("sh", "-c", script), **(defaults | settings)))


@pytest.mark.slow
async def test_agent_on_a_node_is_like_one_on_this_machine(
    nodes: Any, make_trial: MakeTrial, tmp_path: Path
) -> None:
    """One test for one start of Ray: the environment, the log, the working directory, the end at
    the deadline, a cancellation, and a node without room."""
    trial = make_trial(question="2+2", answer="4")
    trial = replace(trial, hidden_fields=frozenset({"answer"}))
    code = 'echo "$AGENT_MODEL"; cat "$TASK_FILE"; echo done > made; exit 3'
    result = await launcher(code, memory_bytes=2**20, workspace_bytes=1000).run(trial)
    assert (result.end, result.error) == (AgentEnd.CRASHED, "exit code 3")
    model, _, task = (trial.directory / "agent.log").read_text().partition("\n")
    assert model == trial.model
    assert json.loads(task) == trial.agent_data
    assert (trial.workspace / "made").read_text() == "done\n"

    late = await launcher("sleep 600", grace_s=0.1).run(make_trial(timeout_s=0.5))
    assert late.end is AgentEnd.TIMED_OUT

    alive, gone = tmp_path / "alive", tmp_path / "gone"
    code = f"trap 'touch {gone}; exit' TERM; touch {alive}; sleep 600 & wait"
    running = asyncio.create_task(launcher(code).run(make_trial()))
    while not alive.exists():  # noqa: ASYNC110 (depends on another process: there is no event)
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone.exists()

    with pytest.raises(LaunchError, match=r"left 2000 bytes .* at most 1000 are copied back"):
        await launcher("head -c 2000 /dev/zero > f", workspace_bytes=1000).run(make_trial())

    crowded = launcher("true", resources={"agents": 2}, start_timeout_s=0.5)
    with pytest.raises(LaunchError, match=r"no node had room for .*'agents': 2.* within 0 s|1 s"):
        await crowded.run(make_trial())


@pytest.mark.long
async def test_lost_node_fails_the_trial_as_our_fault_and_the_next_one_runs(
    nodes: Any, make_trial: MakeTrial, tmp_path: Path
) -> None:
    second = nodes.add_node(**NODE, resources={"second": 1})
    alive = tmp_path / "alive"
    code = f"touch {alive}; sleep 600"
    running = asyncio.create_task(launcher(code, resources={"second": 1}).run(make_trial()))
    while not alive.exists():  # noqa: ASYNC110 (depends on another process: there is no event)
        await asyncio.sleep(0.01)
    nodes.remove_node(second, allow_graceful=False)
    with pytest.raises(LaunchError, match="the agent was lost with its worker or its node"):
        await running
    result = await launcher("true").run(make_trial())
    assert result.end is AgentEnd.EXITED


def test_working_directory_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"0" * 2000)
    with pytest.raises(LaunchError, match=r"2000 bytes .* at most 1000 are copied back; raise"):
        ray_task._packed(tmp_path, 1000)


def test_link_out_of_the_working_directory_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "link").symlink_to("/etc/passwd")
    packed = ray_task._packed(work, 1000)
    assert tarfile.is_tarfile(io.BytesIO(packed))
    with pytest.raises(LaunchError, match="cannot be copied back"):
        ray_task._unpack(packed, tmp_path / "back")
