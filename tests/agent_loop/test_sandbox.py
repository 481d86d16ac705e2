"""What the sandbox hides from a run's agents, and what a hostile agent can do behind it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from agent_loop import remote_agent_config
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.launchers.protocol import Launcher
from agent_loop.launchers.python import PythonConfig, PythonLauncher
from agent_loop.records import Rollout, Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import VerifierConfig
from agent_loop.trial.config import TrialConfig
from harbor_sdk.sandbox import SandboxError, require_privilege
from proxy import wall
from proxy.errors import ConfigurationError
from proxy.machine import landlock, seccomp
from proxy.records import SessionKind
from proxy.wall import Wall
from tests.proxy.conftest import RunningProxy
from trainer.settings.sources import load

LIGHT = wall.missing() or landlock.missing()


def _no_strict() -> str | None:
    try:
        require_privilege()
    except SandboxError as error:
        return str(error)
    return landlock.missing()


SANDBOXES = [
    pytest.param("light", marks=pytest.mark.skipif(LIGHT is not None, reason=str(LIGHT))),
    pytest.param(
        "strict", marks=pytest.mark.skipif(_no_strict() is not None, reason=str(_no_strict()))
    ),
]
THIEF = """
import ctypes, json, os, pathlib, signal, socket, urllib.request
from contextlib import suppress
seen, own = {}, pathlib.Path(os.environ["TASK_FILE"]).parent
for name in ("run", "verifier", "tasks"):
    path = pathlib.Path(os.environ[name.upper()])
    seen[name] = sorted(p.name for p in path.rglob("*")) if path.is_dir() else None
    with suppress(OSError):
        seen[name] = path.read_text()
seen["task"] = json.loads(pathlib.Path(os.environ["TASK_FILE"]).read_text())
seen["processes"] = sorted(p.name for p in pathlib.Path("/proc").glob("[0-9]*"))
with suppress(PermissionError):
    seen["environment of process 1"] = pathlib.Path("/proc/1/environ").read_text()
seen["descriptors"] = sorted(
    n for n in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + n)
)
seen["shared memory"] = os.path.exists("/dev/shm/" + os.environ["SEGMENT"])
trainer = int(os.environ["TRAINER"])

def attempt(what, run):
    try:
        run()
        seen.setdefault("done", []).append(what)
    except OSError as error:
        seen.setdefault("refused", {})[what] = type(error).__name__

def ptrace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, trainer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def connect(port):
    socket.create_connection(("127.0.0.1", port), 5).close()

# Files that the run will write after the agent has ended: links to a victim, and a folder.
for name in ("verifier.log", "verifier.stderr.log", "agent.log"):
    attempt("replace " + name, lambda: ((own / name).unlink(missing_ok=True),
                                        (own / name).symlink_to(os.environ["VICTIM"])))
attempt("folder reward", (own / "reward").mkdir)
attempt("replace task.json", (own / "task.json").unlink)
attempt("stop the trainer", lambda: os.kill(trainer, signal.SIGSTOP))
attempt("trace the trainer", ptrace)
attempt("read its memory", lambda: open(f"/proc/{trainer}/mem", "rb"))
attempt("freeze everything", lambda: os.mkdir("/sys/fs/cgroup/frozen"))
attempt("connect to a private port", lambda: connect(int(os.environ["PRIVATE"])))
attempt("connect to another port", lambda: connect(int(os.environ["OPEN"])))
attempt("write outside", pathlib.Path(os.environ["OUTSIDE"]).touch)
attempt("own files", (pathlib.Path(os.environ["OWN"]) / "settings").touch)
with suppress(OSError):
    pathlib.Path(os.environ["TASK_FILE"]).write_text('{"answer": "0"}')
pathlib.Path("seen.json").write_text(json.dumps(seen))
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
call = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
urllib.request.urlopen(call).read()
"""
VERIFY = """import json, os, sys
task = json.load(open(os.environ["TASK_FILE"]))
print("verified")
sys.exit(task["answer"] != "42")
"""


@dataclass(frozen=True)
class Run:
    """A run's folder with another trial, a verifier, tasks, and files outside of it."""

    folder: Path
    verifier: Path
    tasks: Path
    victim: Path
    outside: Path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder, home = tmp_path / "run", tmp_path / "elsewhere"
    (folder / "trials" / "other").mkdir(parents=True)
    home.mkdir()
    # Not in /tmp, which is another one in a strict sandbox.
    outside = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made = Run(
        folder, tmp_path / "verify.py", tmp_path / "train.jsonl", home / "victim", outside / "new"
    )
    (folder / "sessions.db").write_text("recorded")
    made.verifier.write_text(VERIFY)
    made.tasks.write_text('{"answer": "42"}')
    made.victim.write_text("precious")
    yield made
    shutil.rmtree(outside)


async def run_trial(
    proxy: RunningProxy, run: Run, launcher: Launcher, config: RemoteAgentConfig, ports: set[int]
) -> tuple[Rollout, Path]:
    loop = RemoteAgentLoop(
        proxy.control,
        launcher,
        config.build_rewards(),
        run.folder / "trials",
        trial=config,
        hidden=(run.folder, run.tasks, *config.private_files),
        shown=config.shown_files,
        # With the proxy's, as if all ports of the run were listed.
        private_ports=lambda: frozenset({*ports, int(proxy.url.rpartition(":")[2])}),
    )
    task = Task("sum", {"prompt": "6 * 7", "answer": "42"})
    rollout = await loop.run(task, kind=SessionKind.TRAIN)
    await loop.close()
    return rollout, Path(rollout.logs or "")


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_agent_cannot_reach_the_run_the_verifier_or_the_answers(
    sandbox: str, proxy: RunningProxy, run: Run
) -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    with (
        socket.create_server(("127.0.0.1", 0)) as private,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port = private.getsockname()[1]
        config = RemoteAgentConfig(
            command=CommandConfig(
                argv=(sys.executable, "-I", "-S", "-c", THIEF),
                env={
                    "RUN": str(run.folder),
                    "VERIFIER": str(run.verifier),
                    "TASKS": str(run.tasks),
                    "VICTIM": str(run.victim),
                    "OUTSIDE": str(run.outside),
                    "OWN": "{directory}",
                    "TRAINER": str(os.getpid()),
                    "SEGMENT": segment.name,
                    "PRIVATE": str(port),
                    "OPEN": str(other.getsockname()[1]),
                },
            ),
            verifier=VerifierConfig(argv=("{python}", str(run.verifier))),
            sandbox=sandbox,
            keep_workspaces=True,
            max_retries=0,
        )
        assert config.command is not None
        rollout, logs = await run_trial(proxy, run, CommandLauncher(config.command), config, {port})
    segment.close()
    segment.unlink()
    assert rollout.error is None
    assert rollout.reward == 1.0  # the verifier reads its own copy of the task
    seen = json.loads((logs / "work" / "seen.json").read_text())
    assert "sessions.db" not in seen["run"]
    assert "other" not in seen["run"]
    assert not seen["verifier"]
    assert not seen["tasks"]
    assert seen["task"] == {"prompt": "6 * 7"}
    assert len(seen["processes"]) == 2
    assert seen["processes"][0] == "1"
    assert "environment of process 1" not in seen or sandbox == "strict"
    assert seen["descriptors"] == ["0", "1", "2"]
    assert not seen["shared memory"]
    assert set(seen["refused"]) >= {
        "replace task.json",
        "stop the trainer",
        "trace the trainer",
        "read its memory",
        "freeze everything",
        "connect to a private port",
    }
    assert set(seen["done"]) >= {"connect to another port", "own files"}
    assert "write outside" not in seen["done"]
    assert (logs / "agent" / "settings").exists()
    assert not run.outside.exists()
    assert run.victim.read_text() == "precious"
    for name in ("verifier.log", "verifier.stderr.log", "agent.log"):
        assert not (logs / name).is_symlink()
    assert (logs / "verifier.log").read_text() == "verified\n"


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_function_cannot_replace_the_file_of_its_return_value(
    sandbox: str, proxy: RunningProxy, run: Run
) -> None:
    config = RemoteAgentConfig.model_validate(
        {
            "python": {
                "target": "tests.agent_loop.functions:replaces_its_result",
                "env": {"VICTIM": str(run.victim)},
            },
            "sandbox": sandbox,
            "show": [str(Path(__file__).parents[2])],
            "keep_workspaces": True,
            "max_retries": 0,
        }
    )
    assert isinstance(config.python, PythonConfig)
    rollout, logs = await run_trial(proxy, run, PythonLauncher(config.python), config, set())
    refusals = (logs / "work" / "attempts").read_text().splitlines()
    assert len(refusals) == 3
    assert not (logs / "returned.json").is_symlink()
    assert run.victim.read_text() == "precious"
    assert rollout.reward == 0.5


def test_agent_whose_launcher_gives_the_reward_gets_all_fields_of_the_task() -> None:
    own = RemoteAgentConfig.model_validate({"python": {"target": "json:loads"}})
    graded = RemoteAgentConfig.model_validate(
        {"python": {"target": "json:loads"}, "grader": {"target": "json:dumps"}}
    )
    assert own.fields_hidden == frozenset()
    assert "answer" in graded.fields_hidden


def test_file_that_agent_and_verifier_share_stays_visible(tmp_path: Path) -> None:
    shared = tmp_path / "both.py"
    shared.write_text("")
    config = RemoteAgentConfig.model_validate(
        {
            "command": {"argv": ["python3", str(shared), "solve"]},
            "verifier": {"argv": ["python3", str(shared), "verify"]},
        }
    )
    assert config.private_files == []


def test_machine_without_namespaces_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wall, "missing", lambda: "Operation not permitted")
    agent = {"command": {"argv": ["true"]}}
    with pytest.raises(ConfigurationError, match=r"not permitted.*remote_agent\.sandbox=off"):
        RemoteAgentConfig.model_validate(agent).check_sandbox()
    RemoteAgentConfig.model_validate(agent | {"sandbox": "off"}).check_sandbox()


def test_grader_in_a_file_is_private_and_the_agents_own_file_is_not(tmp_path: Path) -> None:
    for name in ("agent.py", "verify.py"):
        (tmp_path / name).touch()
    config = RemoteAgentConfig.model_validate(
        {
            "python": {"target": f"{tmp_path}/agent.py:run"},
            "grader": {"target": f"{tmp_path}/verify.py:grade"},
        }
    )
    assert config.private_files == [tmp_path / "verify.py"]


def test_strict_sandbox_without_privilege_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise SandboxError("this process does not have CAP_SYS_ADMIN")

    monkeypatch.setattr(remote_agent_config, "require_privilege", refuse)
    config = RemoteAgentConfig.model_validate({"command": {"argv": ["true"]}, "sandbox": "strict"})
    with pytest.raises(ConfigurationError, match=r"strict: .*CAP_SYS_ADMIN.*sandbox=light"):
        config.check_sandbox()


def test_wall_is_that_of_the_configured_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = ("/etc/owned", str(tmp_path / "tools" / "owned"))
    monkeypatch.setattr("agent_loop.trial.config.unreadable", lambda: owned)
    (tmp_path / "tools").mkdir()
    walls = {
        sandbox: TrialConfig.model_validate(
            {"sandbox": sandbox, "hide": ["/data/secret"], "show": [tmp_path / "tools"]}
        ).wall([tmp_path], [Path("/opt/python")])
        for sandbox in ("light", "strict", "off")
    }
    of_root = () if os.geteuid() else owned[:1]
    hide = ("/data/secret", str(tmp_path), str(Path.cwd()), *of_root)
    show = (str(tmp_path / "tools"), "/opt/python")
    assert walls["off"] is None
    assert walls["light"] == Wall(hide=hide, show=show)
    assert walls["strict"] == Wall(hide=hide, show=show, strict=True)


def test_start_says_what_agents_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"command": {"argv": ["true"]}}
    off = RemoteAgentConfig.model_validate(agent | {"sandbox": "off"})
    assert "agents can read and change this run's files" in (off.sandbox_warning or "")
    monkeypatch.setattr(landlock, "missing", lambda: None)
    monkeypatch.setattr(landlock, "missing_scopes", lambda: "this kernel has Landlock 4")
    light = RemoteAgentConfig.model_validate(agent)
    with pytest.raises(ConfigurationError, match=r"abstract sockets .*=\"light without sockets\""):
        light.check_sandbox()
    accepting = RemoteAgentConfig.model_validate(agent | {"sandbox": "light without sockets"})
    accepting.check_sandbox()
    assert "not held: sockets (this kernel has Landlock 4)" in (accepting.sandbox_warning or "")
    monkeypatch.setattr(landlock, "missing", lambda: "this kernel has no Landlock")
    with pytest.raises(ConfigurationError, match="ports of this run's processes"):
        accepting.check_sandbox()
    both = agent | {"sandbox": "light without ports, sockets"}
    RemoteAgentConfig.model_validate(both).check_sandbox()
    monkeypatch.setattr(landlock, "missing", lambda: None)
    monkeypatch.setattr(landlock, "missing_scopes", lambda: None)
    assert light.sandbox_warning is None
    monkeypatch.setattr(seccomp, "missing", lambda: "this kernel has no seccomp")
    with pytest.raises(ConfigurationError, match=r"no seccomp.*\"light without ports, sockets\""):
        light.check_sandbox()
    http = RemoteAgentConfig.model_validate({"http": {"url": "http://h"}, "sandbox": "off"})
    assert http.sandbox_warning is None


def test_quickstart_starts_where_an_older_kernel_lacks_parts_of_the_wall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And says which. What the kernel has is held all the same."""
    monkeypatch.chdir(Path(__file__).parents[2])
    agent = load([Path("agentic_trainer.yaml")]).remote_agent
    monkeypatch.setattr(landlock, "missing", lambda: None)
    monkeypatch.setattr(landlock, "missing_scopes", lambda: "this kernel has Landlock 4")
    monkeypatch.setattr(wall, "missing_processes", lambda: "this is Linux 6.8")
    agent.check_sandbox()
    lacking = "not held: processes (this is Linux 6.8), sockets (this kernel has Landlock 4)"
    assert lacking in (agent.sandbox_warning or "")
    assert agent.sandbox_kind == "light"
