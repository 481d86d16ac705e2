"""What the red team attacks: a project with a run, a home folder, processes and sockets, all of the
test's own, and a trial whose agent plays the tricks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.records import Rollout, Task
from agent_loop.remote_agent_config import RemoteAgentConfig
from agent_loop.remote_agent_loop import RemoteAgentLoop
from proxy.records import SessionKind
from tests.attacks.red_team import tricks
from tests.proxy.conftest import RunningProxy

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VICTIM = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('ready', flush=True); input()"
IPC_CREAT, IPC_RMID = 0o1000, 0
TIMEOUT_S = 120.0
PROCESSES, SHM_BYTES = 64, 8 << 20
"""Bounds of the agent. 300 processes more may be there, of which the kernel keeps the ids."""


@dataclass(frozen=True)
class Place:
    """`places` is what the agent is told: by name, paths, ports and numbers."""

    project: Path
    places: Mapping[str, str]

    @property
    def run(self) -> Path:
        return Path(self.places["run"])


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Place]:
    """The place, in a folder of this repository and not in `/tmp`, which is hidden anyway. The
    working folder and HOME of this process are the project's until the end."""
    before, home_before = Path.cwd(), os.environ["HOME"]
    (ROOT / ".cache").mkdir(exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="red-team-", dir=ROOT / ".cache"))
    mark = f"red-team-{secrets.token_hex(8)}"
    scattered = [Path(folder, mark) for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    try:
        files = _files(base)
        for number, path in enumerate(scattered):
            path = path.with_name(f"{mark}-{number}")
            path.write_bytes(tricks.SECRET)
        names = ("tmp_file", "var_tmp_file", "shm_file")
        files |= {
            n: f"{p}-{number}" for number, (n, p) in enumerate(zip(names, scattered, strict=True))
        }
        os.chdir(files["repository"])
        os.environ["HOME"] = files["home"]
        async with _looker() as looker:
            with _processes(files, mark) as numbers:
                given = {**files, **numbers, "mark": mark, "looker": looker}
                yield Place(Path(files["repository"]), given)
    finally:
        os.chdir(before)
        os.environ["HOME"] = home_before
        shutil.rmtree(base)
        for path in scattered:
            for left in path.parent.glob(f"{mark}*"):
                left.unlink()


def _files(base: Path) -> dict[str, str]:
    project, home = base / "project", base / "home"
    run, old = project / "runs" / "now", project / "runs" / "earlier"
    site = project / ".venv" / "lib" / "python3" / "site-packages"
    files = {
        "verifier": project / "tasks" / "verify.py",
        "tasks": project / "tasks" / "train.jsonl",
        "old_sessions": old / "sessions.db",
        "old_trials": old / "trials.jsonl",
        "run_config": run / "config.yaml",
        "other_log": run / "trials" / "other" / "agent.log",
        "other_work": run / "trials" / "other" / "work" / "answer.txt",
        "log": project / "train.log",
        "template": project / "template" / "given.txt",
        "venv_program": project / ".venv" / "bin" / "program",
        "ssh_key": home / ".ssh" / "id_ed25519",
        "netrc": home / ".netrc",
        "history": home / ".bash_history",
        "admin_key": home / ".local" / "state" / "agentic-proxy" / "admin.key",
        "hub_token": home / ".cache" / "huggingface" / "token",
        "profile": home / ".profile",
        "other_project": base / "elsewhere" / "notes.txt",
    }
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"# " + tricks.SECRET + b"\n")
    site.mkdir(parents=True)
    (project / ".venv" / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    shutil.copy(HERE / "judge.py", files["verifier"].with_name("judge.py"))
    for command in (
        ["init", "-q"],
        ["add", "tasks"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "tasks"],
    ):
        subprocess.run(["git", "-C", str(project), *command], check=True, capture_output=True)
    folders = {"repository": project, "home": home, "run": run, "site": site}
    return {name: str(path) for name, path in {**files, **folders}.items()}


@contextlib.contextmanager
def _processes(files: Mapping[str, str], mark: str) -> Iterator[dict[str, str]]:
    """A process that takes the place of the trainer, and what this process offers."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbits(30)
    segment = libc.shmget(key, 4096, IPC_CREAT | 0o600)
    secret, ring = tricks.SECRET, tricks.USER_KEYRING
    kept = libc.syscall(tricks.ADD_KEY, b"user", mark.encode(), secret, len(secret), ring)
    program = [sys.executable, "-I", "-S", "-c", VICTIM, files["verifier"], tricks.SECRET.decode()]
    with (
        subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"NOTE": tricks.SECRET.decode()},
        ) as victim,
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as path,
    ):
        assert victim.stdout is not None
        victim.stdout.readline()
        abstract.bind("\0" + mark)
        path.bind(files["home"] + "/service.sock")
        for each in (abstract, path):
            each.listen()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free_port = closed.getsockname()[1]
        numbers = {
            "free_port": str(free_port),
            "owned": tricks.owned_file(),
            "left_out": "|".join(tricks.left_out()),
            "victim": str(victim.pid),
            "victim_fd": "3",
            "shm_key": str(key),
            "abstract": mark,
            "socket": files["home"] + "/service.sock",
            "port": str(port.getsockname()[1]),
            "handle": tricks.handle_of(files["verifier"]),
            "mount": files["repository"],
        }
        try:
            yield numbers
        finally:
            libc.shmctl(segment, IPC_RMID, None)
            libc.syscall(tricks.KEYCTL, 9, kept, ring)
            victim.communicate(b"\n")


@contextlib.asynccontextmanager
async def _looker() -> AsyncIterator[str]:
    """A port at which this process says whether it sees a file."""

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).decode().strip()
        writer.write(b"y" if os.path.exists(path) else b"n")
        writer.close()

    server = await asyncio.start_server(look, "127.0.0.1", 0)
    async with server:
        yield str(server.sockets[0].getsockname()[1])


@dataclass(frozen=True)
class Played:
    """What came of the tricks: by name, whether it worked, and otherwise why not."""

    rollout: Rollout
    tricks: Mapping[str, object]
    fooled: Mapping[str, float]

    @property
    def worked(self) -> set[str]:
        return {name for name, result in self.tricks.items() if result is True} | {
            name for name, value in self.fooled.items() if value
        }


async def play(proxy: RunningProxy, at: Place, launcher: str, sandbox: str) -> Played:
    """One trial whose agent plays all tricks and whose verifier says what fooled it."""
    bounds = {"processes": str(PROCESSES + 400), "shm_bytes": str(SHM_BYTES + 1)}
    told = json.dumps({**at.places, **bounds, "own": "OWN"})
    settings = {
        "env": {
            "PLACES": told.replace('"OWN"', '"{directory}"'),
            "PATH": f"{at.project}/.venv/bin:{os.environ['PATH']}",
        },
        "template": str(at.project / "template"),
    }
    agents: dict[str, dict[str, Any]] = {
        "command": {"argv": [sys.executable, "-I", "-S", str(HERE / "tricks.py")], **settings},
        "python": {"target": f"{HERE}/tricks.py:run", **settings},
    }
    agents["ray"] = {**agents["command"], "num_cpus": 0, "workspace_bytes": 1 << 30}
    config = RemoteAgentConfig.model_validate(
        {
            launcher: agents[launcher],
            "process": {"limits": {"processes": PROCESSES, "shm_bytes": SHM_BYTES}},
            "sandbox": sandbox,
            "verifier": {
                "argv": ["{python}", "-m", "judge", "42", at.places["mark"]],
                "env": {
                    "PYTHONPATH": f".:{at.project}/tasks",
                    "PATH": f".:{os.environ['PATH']}",
                    "NOTE": "{task.answer}",
                },
                "show": [f"{at.project}/tasks/judge.py"],
                "timeout_s": TIMEOUT_S,
            },
            "keep_workspaces": True,
            "max_retries": 0,
            "timeout_s": TIMEOUT_S,
        }
    )
    private = [Path(at.places[name]) for name in ("run", "tasks", "verifier")]
    loop = RemoteAgentLoop(
        proxy.control,
        config.build_launcher(),
        config.build_rewards(),
        at.run / "trials",
        trial=config,
        hidden=(*private, *config.private_files),
        shown=config.shown_files,
        private_ports=lambda: frozenset({int(at.places[name]) for name in ("port", "free_port")}),
    )
    try:
        rollout = await loop.run(
            Task("steal", {"prompt": "x", "answer": "42"}), kind=SessionKind.TRAIN
        )
    finally:
        await loop.close()
    logs = Path(rollout.logs or "")
    said = (logs / "agent.log").read_text(errors="replace") if (logs / "agent.log").exists() else ""
    assert rollout.error is None, f"{rollout.error}\n{said[-2000:]}\n{_log(logs)}"
    results = json.loads((logs / "work" / "tricks.json").read_text())
    return Played(
        rollout, results, {n: v for n, v in rollout.reward_parts.items() if n != "reward"}
    )


def _log(logs: Path) -> str:
    path = logs / "verifier.stderr.log"
    return path.read_text(errors="replace")[-2000:] if path.exists() else ""
