"""The process host itself: kill -9 of us, of its server, and work beyond a pipe's size."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError
from agent_loop.launchers.processes import Ended, Job, ProcessHost
from tests.agent_loop.launchers.test_command import DAEMON, alive, until


def job(folder: Path, code: str, *arguments: str, timeout_s: float = 60.0) -> Job:
    return Job(
        argv=[sys.executable, "-I", "-S", "-c", code, *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        log=folder / "log",
        timeout_s=timeout_s,
        grace_s=0.2,
    )


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.agent_loop.launchers.test_processes import ProcessHost, job
folder = Path(sys.argv[1])
asyncio.run(ProcessHost().run(job(folder, sys.argv[2], timeout_s=600)))
"""


async def test_kill_of_whoever_started_it_ends_the_agent_and_its_daemons(tmp_path: Path) -> None:
    code = DAEMON + "open('agent.pid', 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-c", OWNER, str(tmp_path), code]
    owner = await asyncio.create_subprocess_exec(*command)
    await until(lambda: _written(tmp_path / "agent.pid"))
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await until(lambda: not alive(tmp_path / "agent.pid"))
    await until(lambda: not alive(tmp_path / "daemon.pid"))


async def test_killed_server_is_replaced_and_running_jobs_go_on(tmp_path: Path) -> None:
    host = ProcessHost()
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    first = asyncio.ensure_future(host.run(job(tmp_path, "open('up', 'w');" + waits)))
    await until((tmp_path / "up").exists)
    assert host.server_pid is not None
    os.kill(host.server_pid, signal.SIGKILL)
    second: Ended | None = None
    while second is None:
        try:
            second = await host.run(job(tmp_path, "pass"))
        except LaunchError:  # asked before its death was noticed
            continue
    assert second.exit_code == 0
    (tmp_path / "go").touch()
    assert (await first).exit_code == 0
    await host.close()


async def test_job_larger_than_a_pipe_does_not_block(tmp_path: Path) -> None:
    host = ProcessHost()
    large = "x" * 100_000
    code = "import sys; sys.exit(len(sys.argv[1]) + len(sys.argv[2]) != 200_000)"
    assert (await host.run(job(tmp_path, code, large, large))).failure is None
    await host.close()


async def test_many_at_once_each_get_their_own_end(tmp_path: Path) -> None:
    host = ProcessHost()

    async def one(code: int) -> int | None:
        folder = tmp_path / str(code)
        folder.mkdir()
        return (await host.run(job(folder, f"raise SystemExit({code})"))).exit_code

    codes = list(range(40))
    assert await asyncio.gather(*(one(code) for code in codes)) == codes
    await host.close()


async def test_signals_that_python_ignores_reach_programs(tmp_path: Path) -> None:
    host = ProcessHost()
    piped = Job(
        argv=["sh", "-c", "yes | head -n 1"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        log=tmp_path / "log",
        timeout_s=120,
    )
    assert (await host.run(piped)).failure is None
    assert (tmp_path / "log").read_text() == "y\n"
    await host.close()


@pytest.mark.parametrize("argv", [["sleep", "600"], ["sh", "-c", "sleep 600 & sleep 600"]])
async def test_deadline_ends_whole_pipelines(tmp_path: Path, argv: list[str]) -> None:
    host = ProcessHost()
    hanging = Job(
        argv=argv,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        log=tmp_path / "log",
        timeout_s=0.3,
        grace_s=5,
    )
    ended = await host.run(hanging)
    assert ended.ended_by == "timeout"
    assert ended.wall_s < 5
    await host.close()


def _written(path: Path) -> bool:
    return path.exists() and path.read_text() != ""
