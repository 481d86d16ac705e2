"""What an agent behind the wall can see and do, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy import wall
from proxy.machine import landlock
from tests.proxy import walled

REFUSED = wall.missing() or landlock.missing()
pytestmark = pytest.mark.skipif(
    REFUSED is not None, reason=f"this machine refuses namespaces: {REFUSED}"
)
ROOT = Path(__file__).parents[2]
NOBODY = 65534
USERS = [pytest.param(NOBODY, id="user")] + ([pytest.param(0, id="root")] * (os.getuid() == 0))


@dataclass(frozen=True)
class Place:
    """A run's folder with one trial, and a file with answers next to the agent's script."""

    run: Path
    trial: Path
    answers: Path
    output: Path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    run, tasks = tmp_path / "run", tmp_path / "tasks"
    trial, other = run / "trials" / "t-1", run / "trials" / "t-2"
    for folder in (trial, other, tasks):
        folder.mkdir(parents=True)
    (run / "sessions.db").write_text("recorded")
    (other / "agent.log").write_text("another agent")
    (tasks / "answers.jsonl").write_text("42")
    (tasks / "agent.py").write_text("pass")
    for folder in (tmp_path, *tmp_path.parents):  # pytest's folders are closed to other users
        folder.chmod(folder.stat().st_mode | 0o111)
        if folder.name.startswith("pytest-of-"):
            break
    trial.chmod(0o777)
    return Place(run, trial, tasks / "answers.jsonl", trial / "output")


def behind(place: Place, script: str, *, user: int = 0, rules_fd: int = -1) -> int:
    """Runs a shell script behind the wall; returns its exit code. Output: `place.output`."""
    with start(place, script, user=user, rules_fd=rules_fd) as gate:
        return gate.wait()


def start(
    place: Place, script: str, *, user: int = 0, rules_fd: int = -1
) -> subprocess.Popen[bytes]:
    job = {
        "script": textwrap.dedent(script),
        "hide": [str(place.run), str(place.answers)],
        "show": [str(place.answers.parent)],
        "keep": str(place.trial),
        "output": str(place.output),
        "user": user,
        "rules_fd": rules_fd,
    }
    command = [sys.executable, "-m", walled.__name__, json.dumps(job)]
    descriptors = (rules_fd,) if rules_fd >= 0 else ()
    return subprocess.Popen(command, cwd=ROOT, pass_fds=descriptors)


@pytest.mark.parametrize("user", USERS)
def test_agent_sees_its_trial_but_neither_the_run_nor_the_answers(place: Place, user: int) -> None:
    script = f"""
        cat {place.answers}; ls {place.run} {place.run}/trials; pwd; echo made > made
        cat {place.run}/sessions.db {place.run}/trials/t-2/agent.log; ls {place.answers.parent}
    """
    behind(place, script, user=user)
    lines = place.output.read_text().splitlines()
    assert "42" not in lines
    assert "recorded" not in lines
    assert "another agent" not in lines
    assert lines[:2] == [f"{place.run}:", "trials"]
    assert "t-2" not in lines
    assert str(place.trial) in lines
    assert "agent.py" in lines
    assert (place.trial / "made").read_text() == "made\n"


@pytest.mark.parametrize("user", USERS)
def test_agent_sees_only_its_own_processes(place: Place, user: int) -> None:
    behind(place, "ls /proc | grep -c '^[0-9]'; echo $$; cat /proc/1/environ", user=user)
    count, pid, refusal = place.output.read_text().splitlines()
    assert int(count) <= 5
    assert pid == "2"
    assert "Permission denied" in refusal


@pytest.mark.parametrize("user", USERS)
def test_agent_cannot_remove_the_wall(place: Place, user: int) -> None:
    script = f"""
        umount {place.run}; umount {place.answers}; umount -l /proc; touch {place.run}/mine
        unshare -Urm sh -c 'umount {place.run} {place.answers}; cat {place.answers}'
        mount -t proc proc /proc; echo x > /proc/sys/kernel/core_pattern
        cat {place.run}/sessions.db {place.answers}
    """
    behind(place, script, user=user)
    text = place.output.read_text()
    assert "42\n" not in text
    assert "recorded" not in text
    assert not (place.run / "mine").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root could read disks")
def test_root_behind_the_wall_can_neither_read_disks_nor_create_devices(place: Place) -> None:
    disks = [
        f"/dev/{name}" for name in os.listdir("/dev") if Path(f"/dev/{name}").is_block_device()
    ]
    script = (
        f"for d in {' '.join(disks)}; do test -b $d && echo $d; done; mknod n b 254 0 && echo made"
    )
    behind(place, script)
    assert "made" not in place.output.read_text().splitlines()
    assert not any(disk in place.output.read_text().splitlines() for disk in disks)


@pytest.mark.parametrize("user", USERS)
def test_agent_can_connect_to_all_but_the_refused_ports(place: Place, user: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as refused,
        socket.create_server(("127.0.0.1", 0)) as open_,
    ):
        ports = [server.getsockname()[1] for server in (refused, open_)]
        rules_fd = landlock.refuse_ports([ports[0]])
        script = "".join(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && echo {port}\n" for port in ports)
        behind(place, script, user=user, rules_fd=rules_fd)
        os.close(rules_fd)
    lines = place.output.read_text().splitlines()
    assert str(ports[1]) in lines
    assert str(ports[0]) not in lines


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)]
)
def test_gate_ends_with_the_agents_exit_code_or_signal(
    place: Place, script: str, code: int
) -> None:
    assert behind(place, script) == code


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_to_the_gates_group_reaches_the_agent(place: Place) -> None:
    script = "trap 'echo terminated; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with start(place, script) as gate:
        _wait_for(lambda: place.output.exists() and "ready" in place.output.read_text())
        os.kill(_init_of(gate.pid), signal.SIGTERM)
        assert gate.wait() == 3
    assert "terminated" in place.output.read_text()


def test_killing_the_gate_ends_everything_behind_the_wall(place: Place) -> None:
    with start(place, "setsid sleep 600 & echo ready; sleep 600") as gate:
        _wait_for(lambda: place.output.exists() and "ready" in place.output.read_text())
        pidfd = os.pidfd_open(_init_of(gate.pid))
        gate.kill()
    assert select.select([pidfd], [], [], 30)[0] == [pidfd]
    os.close(pidfd)


def _init_of(gate: int) -> int:
    return int(Path(f"/proc/{gate}/task/{gate}/children").read_text().split()[0])


def test_hidden_path_that_does_not_exist_is_ignored(place: Place) -> None:
    nowhere = Place(place.run / "none", place.trial, place.answers, place.output)
    assert behind(nowhere, "exit 0") == 0


def test_wall_is_available_or_gives_the_reason() -> None:
    assert wall.missing() is None
    assert sys.platform == "linux"
