"""The process host: `kill -9` of its owner and of its server, and jobs larger than a pipe."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError
from agent_loop.processes.host import Ended, Job, Limits, ProcessHost
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
from tests.agent_loop.processes.test_host import ProcessHost, job
folder = Path(sys.argv[1])
asyncio.run(ProcessHost().run(job(folder, sys.argv[2], timeout_s=600)))
"""


async def test_killing_the_process_that_started_an_agent_ends_the_agent_and_its_daemons(
    tmp_path: Path,
) -> None:
    code = DAEMON + "open('agent.pid', 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-c", OWNER, str(tmp_path), code]
    owner = await asyncio.create_subprocess_exec(*command)
    await until(lambda: _written(tmp_path / "agent.pid"))
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await until(lambda: not alive(tmp_path / "agent.pid"))
    await until(lambda: not alive(tmp_path / "daemon.pid"))


async def test_killed_server_is_replaced_and_running_jobs_continue(tmp_path: Path) -> None:
    host = ProcessHost()
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    first = asyncio.ensure_future(host.run(job(tmp_path, "open('up', 'w');" + waits)))
    await until((tmp_path / "up").exists)
    assert host._server is not None
    host._server.kill()
    second: Ended | None = None
    while second is None:
        try:
            second = await host.run(job(tmp_path, "pass"))
        except LaunchError:  # the request was sent before the server's end was noticed
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


async def test_concurrent_jobs_each_get_their_own_exit_code(tmp_path: Path) -> None:
    host = ProcessHost()

    async def one(code: int) -> int | None:
        folder = tmp_path / str(code)
        folder.mkdir()
        return (await host.run(job(folder, f"raise SystemExit({code})"))).exit_code

    codes = list(range(40))
    assert await asyncio.gather(*(one(code) for code in codes)) == codes
    await host.close()


async def test_signals_that_python_ignores_are_not_ignored_in_programs(tmp_path: Path) -> None:
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
async def test_deadline_ends_every_process_of_a_pipeline(tmp_path: Path, argv: list[str]) -> None:
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


WRITES_3000_BYTES = "f = open('big', 'wb', 0)\nfor _ in range(3): f.write(b'x' * 1000)"


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (Limits(file_bytes=1000), WRITES_3000_BYTES, "File too large"),
        (Limits(open_files=20), "f = [open('/dev/null') for _ in range(50)]", "Too many open"),
    ],
)
async def test_limits_of_files_reach_the_program(
    tmp_path: Path, limits: Limits, code: str, said: str
) -> None:
    host = ProcessHost()
    ended = await host.run(replace(job(tmp_path, code), limits=limits))
    assert ended.exit_code == 1
    assert said in (tmp_path / "log").read_text()
    await host.close()


async def test_limit_of_processor_time_kills_the_program(tmp_path: Path) -> None:
    host = ProcessHost()
    busy = replace(job(tmp_path, "while True: pass"), limits=Limits(cpu_s=1))
    ended = await host.run(busy)
    assert re.search(r"killed by signal \d+: it used .* limits.cpu_s is 1", ended.failure or "")
    await host.close()


FORKS = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(os.urandom(40 << 20))
        time.sleep(600)
time.sleep(600)
"""
FILES = """
import os, time
os.mkdir("many")
for number in range(40):
    open(f"many/{number}", "wb").write(os.urandom(1 << 20))
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (
            Limits(memory_bytes=200 << 20),
            FORKS,
            r"its processes used \d+ MiB of memory together, and at most 200 MiB .*memory_bytes",
        ),
        (
            Limits(file_bytes=20 << 20),
            FILES,
            r"its files have \d+ MiB together, and at most 20 MiB .*limits.file_bytes",
        ),
    ],
)
async def test_program_is_ended_when_it_passes_a_limit_of_all_its_processes(
    tmp_path: Path, limits: Limits, code: str, said: str
) -> None:
    """Each of them and each file is within it."""
    host = ProcessHost()
    ended = await host.run(replace(job(tmp_path, code), limits=limits))
    assert ended.ended_by == "limit"
    assert re.match(said, ended.failure or "")
    await host.close()


async def test_memory_that_processes_share_is_counted_once(tmp_path: Path) -> None:
    code = """
import os, time
kept = os.urandom(60 << 20)
for _ in range(8):
    if os.fork() == 0:
        time.sleep(1.5)
        os._exit(0)
for _ in range(8):
    os.wait()
"""
    host = ProcessHost()
    ended = await host.run(replace(job(tmp_path, code), limits=Limits(memory_bytes=200 << 20)))
    assert ended.failure is None
    await host.close()


async def test_failed_allocation_names_the_limit(tmp_path: Path) -> None:
    host = ProcessHost()
    large = replace(job(tmp_path, "bytes(1 << 30)"), limits=Limits(memory_bytes=200 << 20))
    ended = await host.run(large)
    assert re.fullmatch(
        r"exit code 1: its largest process used \d+ MiB, and could reserve 200 MiB .*",
        ended.failure or "",
    )
    await host.close()


async def test_kernel_without_memory_ends_programs_first(tmp_path: Path) -> None:
    host = ProcessHost()
    await host.run(job(tmp_path, "print(open('/proc/self/oom_score_adj').read())"))
    assert (tmp_path / "log").read_text().strip() == "1000"
    await host.close()


async def test_full_disk_ends_an_agent_with_its_daemons(tmp_path: Path) -> None:
    host = ProcessHost()
    code = DAEMON + "print('more', flush=True); time.sleep(600)"
    full = replace(job(tmp_path, code), log=Path("/dev/full"))
    with pytest.raises(LaunchError, match="No space left on device"):
        await host.run(full)
    assert not alive(tmp_path / "daemon.pid")
    await host.close()


async def test_second_cancellation_waits_for_the_agents_end_too(tmp_path: Path) -> None:
    """Such as of a straggler whose group is cancelled for its age while it is being ended."""
    host = ProcessHost()
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    running = asyncio.ensure_future(
        host.run(job(tmp_path, ignores + DAEMON + "open('up', 'w'); time.sleep(600)"))
    )
    await until((tmp_path / "up").exists)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert not alive(tmp_path / "daemon.pid")
    await host.close()


BECOMES = """
import os
from agent_loop.processes import supervisor
def body(job, error_fd):
    raise {fault!r}
log = os.open("log", os.O_WRONLY | os.O_CREAT)
fds = supervisor.ChildFds(log, log, os.dup(1), os.dup(log))
job = dict(wall=None, open_files=1024, limits=dict(), cwd=".")
try:
    supervisor._become_agent(job, body, fds, os.getppid())
finally:
    os._exit(3)  # it went on as its parent
"""


@pytest.mark.parametrize(
    ("fault", "words"), [(KeyError("names"), "KeyError: 'names'"), (OSError("no room"), "no room")]
)
def test_child_that_cannot_become_its_agent_says_why_and_never_goes_on_as_its_parent(
    fault: Exception, words: str, tmp_path: Path
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", BECOMES.format(fault=fault)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (child.returncode, child.stdout) == (127, words)
