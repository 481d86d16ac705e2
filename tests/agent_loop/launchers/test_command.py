"""The command launcher with agents that misbehave: each is ended and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agent_loop.errors import LaunchError
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.host import PROCESS, Limits, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Task, Trial
from proxy.errors import ConfigurationError
from proxy.wall import Wall
from tests.agent_loop.conftest import MakeTrial


async def run_python(
    trial: Trial, code: str, process: ProcessConfig = PROCESS, **settings: object
) -> AgentResult:
    argv = (sys.executable, "-I", "-S", "-c", code)
    config = CommandConfig(argv=argv, **settings)
    launcher = CommandLauncher(config, process)
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


STRICT = pytest.param("strict", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))


@pytest.fixture(params=["light", STRICT, "off"])
def make_trial(make_trial: MakeTrial, tmp_path: Path, request: pytest.FixtureRequest) -> MakeTrial:
    """Trials with and without a wall: an agent behaves the same in all of them."""
    strict = request.param == "strict"
    wall = None if request.param == "off" else Wall(hide=(str(tmp_path),), strict=strict)

    def make(timeout_s: float = 120.0, **data: object) -> Trial:
        return replace(make_trial(timeout_s, **data), wall=wall)

    return make


def alive(pid_file: Path) -> bool:
    """Whether any process has the file's folder as its working directory. The process id in the
    file cannot be used, because a process behind a wall has another id outside."""
    assert pid_file.exists()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")) == pid_file.parent:
                return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (depends on another process: there is no event to await)
        await asyncio.sleep(0.01)


def log_of(trial: Trial) -> str:
    return (trial.directory / "agent.log").read_text()


DAEMON = """
import os, sys, time
pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        open("daemon.tmp", "w").write(str(os.getpid()))
        os.rename("daemon.tmp", "daemon.pid")
        time.sleep(600)
    os._exit(0)
os.waitpid(pid, 0)
while not os.path.exists("daemon.pid"):
    time.sleep(0.01)
"""


SECRETS = (
    *("AGENTIC_PROXY_ADMIN_KEY", "AGENTIC_PROXY_STORE", "MISTRAL_API_KEY", "HF_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "PGPASSWORD", "MYAPIKEY", "GITHUB_PAT"),
)
REPLACED = ("ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENAI_API_KEY")
"""An agent has them with the key of its session."""
URLS = ("DATABASE_URL", "HTTPS_PROXY", "http_proxy")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *REPLACED):
        monkeypatch.setenv(name, "hunter2")
    for name in URLS:
        monkeypatch.setenv(name, "https://me:hunter2@host/")


@pytest.mark.usefixtures("secrets")
async def test_agent_inherits_no_secret_whatever_its_name(make_trial: MakeTrial) -> None:
    trial = make_trial()
    await run_python(trial, "import os; print(sorted(os.environ), dict(os.environ))")
    assert "PATH" in log_of(trial)
    assert "hunter2" not in log_of(trial)
    assert not [name for name in (*SECRETS, *URLS) if f"'{name}'" in log_of(trial)]


@pytest.mark.usefixtures("secrets")
async def test_agent_finds_no_secret_in_the_environment_of_its_supervisor(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    await run_python(trial, "import os; print(open(f'/proc/{os.getppid()}/environ').read())")
    if trial.wall is None:
        assert "PATH=" in log_of(trial)
    else:  # there is no such process in a sandbox
        assert "Error: " in log_of(trial)
        assert "PATH=" not in log_of(trial)
    assert "hunter2" not in log_of(trial)


@pytest.mark.usefixtures("secrets")
async def test_agent_gets_the_variables_that_are_passed_by_name(make_trial: MakeTrial) -> None:
    trial = make_trial()
    code = "import os; print(os.environ.get('PGPASSWORD'), os.environ.get('MYAPIKEY'))"
    await run_python(trial, code, ProcessConfig(pass_env=("PGPASSWORD", "NOT_SET")))
    assert log_of(trial) == "hunter2 None\n"


async def test_agent_gets_the_environment_variables_of_every_sdk(
    make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    trial = make_trial()
    code = "import os, json; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))"
    result = await run_python(trial, code, env={"EXTRA": "{model}/{task.prompt}/{unknown}"})
    assert result.end is AgentEnd.EXITED
    seen = json.loads(log_of(trial))
    assert seen["OPENAI_BASE_URL"] == seen["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1"
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert seen["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert seen["GEMINI_API_KEY"] == "key-of-t-1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "key-of-t-1"
    assert seen["AGENT_MODEL"] == seen["OPENAI_MODEL"] == "policy"
    assert seen["TASK_PROMPT"] == "do it"
    assert seen["TOKENIZERS_PARALLELISM"] == "false"
    assert json.loads(trial.task_file.read_text()) == {"prompt": "do it"}
    folder = trial.directory if trial.seen_at is None else trial.seen_at[1]
    assert seen["TASK_FILE"] == str(folder / "task.json")
    assert seen["cwd"] == str(folder / "work")
    assert seen["EXTRA"] == "policy/do it/{unknown}"


async def test_working_directory_is_a_copy_of_the_tasks_template(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    (tmp_path / "templates" / "a").mkdir(parents=True)
    (tmp_path / "templates" / "a" / "file.txt").write_text("before")
    trial = make_trial(folder="a")
    template = str(tmp_path / "templates" / "{task.folder}")
    result = await run_python(trial, "open('file.txt', 'w').write('after')", template=template)
    assert result.end is AgentEnd.EXITED
    assert (trial.workspace / "file.txt").read_text() == "after"
    assert (tmp_path / "templates" / "a" / "file.txt").read_text() == "before"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def test_working_directory_is_a_checkout_of_the_tasks_revision(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    for text in ("first", "second"):
        (repository / "file.txt").write_text(text)
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", text)
    trial = make_trial(revision=git(repository, "rev-parse", "HEAD~1"))
    template = f"git+{repository}#{{task.revision}}"
    result = await run_python(trial, "print(open('file.txt').read())", template=template)
    assert result.end is AgentEnd.EXITED
    assert log_of(trial) == "first\n"


async def test_agent_cannot_damage_the_repository_that_it_works_on(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    (repository / "file.txt").write_text("first")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "first")
    code = (
        "import pathlib\nfor path in pathlib.Path('.git/objects').rglob('*'):\n"
        "    if path.is_file():\n        path.chmod(0o600)\n        path.write_bytes(b'')"
    )
    await run_python(make_trial(), code, template=f"git+{repository}")
    assert git(repository, "fsck") == ""
    assert git(repository, "show", "HEAD:file.txt") == "first"


async def test_missing_revision_is_a_launch_error(make_trial: MakeTrial, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot check out .*nowhere"):
        await run_python(make_trial(), "pass", template=f"git+{tmp_path}/nowhere#main")


async def test_nonzero_exit_code_is_a_crash_with_this_code(make_trial: MakeTrial) -> None:
    result = await run_python(make_trial(), "raise SystemExit(3)")
    assert (result.end, result.error) == (AgentEnd.CRASHED, "exit code 3")


async def test_log_of_gigabytes_of_output_keeps_the_first_and_last_bytes(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(timeout_s=60)
    code = (
        "import os\nos.write(1, b'first')\nblock = b'x' * (1 << 20)\n"
        "for _ in range(2048):\n    os.write(1, block)\nos.write(1, b'last')"
    )
    result = await run_python(trial, code, ProcessConfig(log_bytes=4096))
    assert result.end is AgentEnd.EXITED
    log = log_of(trial)
    assert len(log) < 4096 + 100
    assert log.startswith("first")
    assert log.endswith("last")
    assert f"{(1 << 31) + 9 - 4096} bytes not kept" in log
    assert result.metrics["agent_output_bytes"] == (1 << 31) + 9


async def test_daemon_in_its_own_session_is_ended_with_the_agent(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    result = await run_python(trial, DAEMON)
    assert result.end is AgentEnd.EXITED
    assert result.metrics["agent_left_over_processes"] == 1
    assert not alive(trial.workspace / "daemon.pid")


async def test_agent_that_ignores_sigterm_is_killed_after_grace_s(
    make_trial: MakeTrial,
) -> None:
    code = (
        "import signal, time, os\nsignal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))"
        "\nopen('agent.pid', 'w').write(str(os.getpid()))\nwhile True:\n    time.sleep(600)"
    )
    trial = make_trial(timeout_s=2.0)
    result = await run_python(trial, code, ProcessConfig(grace_s=0.3))
    assert result.end is AgentEnd.TIMED_OUT
    assert log_of(trial) == "no\n"
    assert not alive(trial.workspace / "agent.pid")


async def test_agent_can_finish_its_work_within_grace_s(make_trial: MakeTrial) -> None:
    code = (
        "import signal, time, sys\n"
        "def stop(*_):\n    open('saved', 'w').write('yes')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nwhile True:\n    time.sleep(600)"
    )
    trial = make_trial(timeout_s=2.0)
    result = await run_python(trial, code, ProcessConfig(grace_s=10))
    assert result.end is AgentEnd.TIMED_OUT
    assert (trial.workspace / "saved").read_text() == "yes"


async def test_cancelling_ends_the_agent_and_its_daemons_before_it_raises(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial(timeout_s=600)
    process = ProcessConfig(grace_s=0.2)
    running = asyncio.ensure_future(run_python(trial, DAEMON + "time.sleep(600)", process))
    await until((trial.workspace / "daemon.pid").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(trial.workspace / "daemon.pid")


async def test_killed_supervisor_is_a_launch_error_and_ends_the_agent(
    make_trial: MakeTrial,
) -> None:
    trial = make_trial()
    code = (
        "import os, signal, time\nopen('agent.pid', 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid() or 1, signal.SIGKILL)\n"
    )
    if trial.wall is not None:  # an agent behind a wall can kill only its own processes
        result = await run_python(trial, code)
        assert result.end is AgentEnd.EXITED
        return
    with pytest.raises(LaunchError, match="supervisor"):
        await run_python(trial, code + "time.sleep(600)")
    await until(lambda: not alive(trial.workspace / "agent.pid"))


async def test_memory_limit_applies_to_the_agent(make_trial: MakeTrial) -> None:
    trial = make_trial()
    process = ProcessConfig(limits=Limits(memory_bytes=200 << 20))
    result = await run_python(trial, "x = b'x' * (1 << 30)", process)
    assert result.end is AgentEnd.CRASHED
    assert "MemoryError" in log_of(trial)


def test_missing_command_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="'no-such-agent' is not"):
        CommandLauncher(CommandConfig(argv=("no-such-agent",)))


async def test_missing_program_named_by_a_task_is_a_launch_error(
    make_trial: MakeTrial,
) -> None:
    launcher = CommandLauncher(CommandConfig(argv=("{task.program}",)))
    with pytest.raises(LaunchError, match="No such file"):
        await launcher.run(make_trial(program="no-such-agent"))
    await launcher.close()


async def test_repeated_trials_leak_no_descriptors(tmp_path: Path) -> None:
    launcher = CommandLauncher(CommandConfig(argv=("true",)))

    async def once(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        trial = Trial(str(number), Task("t", {}), "http://x/v1", "k", "m", directory, 120.0)
        assert (await launcher.run(trial)).end is AgentEnd.EXITED

    await once(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 6):
        await once(number)
    assert len(os.listdir("/proc/self/fd")) == before
    await launcher.close()


LISTENS = """
import os, socket
folder = os.environ.get("TMUX_TMPDIR")
if folder is None:
    print("shared")
else:
    os.mkdir(f"{folder}/tmux-{os.getuid()}")
    socket.socket(socket.AF_UNIX).bind(f"{folder}/tmux-{os.getuid()}/openhands")
    print("of its own")
"""


@pytest.mark.parametrize(("deep", "expected"), [(False, "of its own"), (True, "shared")])
async def test_each_trial_has_a_tmux_server_of_its_own_where_a_socket_can_be(
    make_trial: MakeTrial, deep: bool, expected: str
) -> None:
    trial = make_trial()
    with TemporaryDirectory() as short:
        directory = Path(short) / ("deep" * 20 if deep else "run")
        shutil.copytree(trial.directory, directory)
        moved = replace(trial, directory=directory)
        await run_python(moved, LISTENS)
        assert log_of(moved).split() == expected.split()
