"""Real Harbor trials (its oracle and nop agents) in our environment, through our server."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from harbor_sdk import AgentRun, AgentRunClient, AgentRunRequest, AgentSpec, RunStatus
from tests.e2e.harbor_server import PROGRAM, HarborServer, harbor_server, needs_harbor
from tests.harbor_sdk.harbor_tasks import write_task

pytestmark = needs_harbor
WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarborServer]:
    with harbor_server(tmp_path_factory.mktemp("state")) as server:
        yield server


@pytest.fixture
async def client(server: HarborServer) -> AsyncIterator[AgentRunClient]:
    async with AgentRunClient(server.url) as client:
        yield client


async def _run(client: AgentRunClient, task: Path, agent: str = "oracle") -> AgentRun:
    run = await client.submit(AgentRunRequest(agent=AgentSpec(name=agent)), task=task)
    return await client.wait(run.run_id, timeout_s=WAIT_S)


async def test_concurrent_trials_never_see_each_other(
    client: AgentRunClient, tmp_path: Path
) -> None:
    look = "sleep 1; ls /app /tmp; grep -rs hello- /app > /logs/artifacts/seen.txt\n"
    tasks = [write_task(tmp_path / "in", name, solve=look) for name in ("one", "two", "three")]
    runs = await asyncio.gather(
        *(_run(client, task) for task in tasks),
        *(_run(client, task, "nop") for task in tasks),
    )
    assert [run.status for run in runs] == [RunStatus.COMPLETED] * 6, [run.error for run in runs]
    assert [run.rewards for run in runs[:3]] == [{"reward": 1.0, "files": 3.0}] * 3
    assert [run.rewards for run in runs[3:]] == [{"reward": 0.0, "files": 0.0}] * 3
    for run, task in zip(runs, tasks, strict=False):
        files = await client.artifacts(run.run_id)
        seen = next(path for path in files if path.endswith("seen.txt"))
        content = (await client.artifact(run.run_id, seen)).decode()
        assert content == f"/app/answer.txt:hello-{task.name}\n"


async def test_task_sees_neither_tests_and_solution_nor_the_servers_state(
    client: AgentRunClient, server: HarborServer, tmp_path: Path
) -> None:
    write_task(tmp_path / "in", "other")
    places = f"{tmp_path}/in {server.state_dir} {Path.home()} /tests"
    peek = f"find {places} -type f > /logs/artifacts/found.txt 2>/dev/null; true\n"
    run = await _run(client, write_task(tmp_path / "in", "one", solve=peek))
    assert run.rewards == {"reward": 1.0, "files": 3.0}
    files = await client.artifacts(run.run_id)
    found = next(path for path in files if path.endswith("found.txt"))
    assert await client.artifact(run.run_id, found) == b""


async def test_agent_ended_at_its_timeout_is_still_verified(
    client: AgentRunClient, tmp_path: Path
) -> None:
    task = write_task(tmp_path, "one", solve="sleep 4321\n", agent_timeout_s=2)
    run = await _run(client, task)
    assert run.status is RunStatus.TIMEOUT
    assert run.rewards == {"reward": 1.0, "files": 3.0}
    assert run.error_type == "AgentTimeoutError"


@pytest.mark.parametrize("verify", ["#!/bin/bash\nexit 1\n", "#!/bin/bash\nkill -9 $$\n"])
async def test_verifier_without_reward_is_a_failure_and_not_a_zero(
    client: AgentRunClient, tmp_path: Path, verify: str
) -> None:
    run = await _run(client, write_task(tmp_path, "one", verify=verify))
    assert run.status is RunStatus.FAILED
    assert run.rewards is None
    assert run.error


async def test_environment_that_cannot_start_is_a_failure(
    client: AgentRunClient, tmp_path: Path
) -> None:
    build = "FROM debian:12\nWORKDIR /app\nRUN echo broken-here >&2; exit 3\n"
    run = await _run(client, write_task(tmp_path, "one", dockerfile=build))
    assert run.status is RunStatus.FAILED
    assert run.rewards is None
    assert "broken-here" in (run.error or "")


async def test_task_of_several_steps_reports_each_step(
    client: AgentRunClient, tmp_path: Path
) -> None:
    run = await _run(client, write_task(tmp_path, "one", steps=("first", "second")))
    assert run.status is RunStatus.COMPLETED, run.error
    assert [(step.name, step.rewards) for step in run.steps] == [
        ("first", {"reward": 1.0, "files": 3.0}),
        ("second", {"reward": 1.0, "files": 3.0}),
    ]


async def test_cancelling_ends_trial_and_sandbox(client: AgentRunClient, tmp_path: Path) -> None:
    seconds = _seconds()
    run = await _begun(client, tmp_path, seconds)
    assert _sleepers(seconds) == 1
    assert (await client.cancel(run.run_id)).status is RunStatus.CANCELLED
    assert _sleepers(seconds) == 0


async def test_killed_server_leaves_nothing_running_and_reports_lost_runs(
    tmp_path: Path,
) -> None:
    seconds = _seconds()
    with harbor_server(tmp_path / "state") as server:
        async with AgentRunClient(server.url) as client:
            done = await _run(client, write_task(tmp_path, "two"))
            run = await _begun(client, tmp_path, seconds)
            assert _sleepers(seconds) == 1
            server.kill()
    with harbor_server(tmp_path / "state") as server:
        async with AgentRunClient(server.url) as client:
            assert (await client.get(run.run_id)).status is RunStatus.LOST
            assert (await client.get(done.run_id)).rewards == {"reward": 1.0, "files": 3.0}
    assert _sleepers(seconds) == 0


_LOCAL = """
import asyncio, sys
from pathlib import Path
from agent_loop.extras.harbor.launcher import HarborLauncher, HarborConfig
from agent_loop.records import Trial
from agent_loop.records import Task

async def main(task, directory):
    trial = Trial("t-1", Task("one", {"local_task_path": task}), "http://127.0.0.1:9/v1", "key",
                  "policy", Path(directory), 30.0)
    launcher = HarborLauncher(HarborConfig(agent_name="oracle", use_local_trial=True))
    result = await launcher.run(trial)
    print(result.end.value, result.reward, result.reward_parts)

asyncio.run(main(*sys.argv[1:]))
"""


def test_local_trial_runs_in_the_launchers_process(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    task = write_task(tmp_path / "tasks", "one")
    done = subprocess.run(
        [PROGRAM.parent / "python", "-c", _LOCAL, task, tmp_path / "trial"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "exited 1.0 {'reward': 1.0, 'files': 3.0}\n", done.stderr


def _seconds() -> str:
    """How long the agent of one test sleeps: by this its process is known among those of others."""
    return f"4321.{secrets.randbelow(10**9):09}"


async def _begun(client: AgentRunClient, folder: Path, seconds: str) -> AgentRun:
    """A run whose agent is in the middle of its work."""
    asleep = "until grep -q sleep /proc/$!/comm; do :; done"
    solve = f"sleep {seconds} & {asleep}; touch /logs/agent/begun; wait\n"
    task = write_task(folder, "endless", solve=solve, agent_timeout_s=2000)
    run = await client.submit(AgentRunRequest(), task=task)
    async with asyncio.timeout(WAIT_S):
        while "agent/begun" not in await client.artifacts(run.run_id):
            await client.get(run.run_id)
    return run


def _sleepers(seconds: str) -> int:
    """Number of processes that run that task's `sleep`."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == f"sleep\0{seconds}\0".encode()
        except OSError:
            continue
    return count


def test_server_writes_to_standard_output_only_its_address(server: HarborServer) -> None:
    """What libraries print there would fill the pipe of a reader that wants the address only."""
    output, errors = (Path(f"/proc/{server.process.pid}/fd/{number}") for number in (1, 2))
    assert output.readlink() == errors.readlink() == server.state_dir / "server.log"
