"""What an agent behind the wall can see and do, as root and as an ordinary user."""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
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
from proxy.machine import landlock, seccomp
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
        "show": [str(place.answers.parent), sys.prefix, sys.base_prefix],
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


CALLS = """
import ctypes, mmap, os, socket, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
add_key, keyctl, clone3 = {numbers}

def sockets(*kind):
    with socket.socket(*kind):
        return 0

def call(*arguments):
    return 0 if libc.syscall(*arguments) >= 0 else ctypes.get_errno()

def tried(name, function):
    try:
        print(name, function() or "done")
    except OSError as error:
        print(name, error.errno)

def first_bytes(send):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as link:
        send(link, server.getsockname())

def compatible(number):
    "The call as a program of 32 bits makes it; it ends the process where there are none."
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(b"\\xb8" + struct.pack("I", number) + b"\\x53\\xbb\\0\\0\\0\\0\\xcd\\x80\\x5b\\xc3")
    at = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if (pid := os.fork()) == 0:
        os._exit(-ctypes.CFUNCTYPE(ctypes.c_int)(at)() & 0xFF)
    status = os.wait()[1]
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else {absent}

tried("multipath", lambda: sockets(socket.AF_INET, socket.SOCK_STREAM, 262))
tried("multipath6", lambda: sockets(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 262))
tried("smc", lambda: sockets(socket.AF_INET, socket.SOCK_STREAM, 256))
tried("sctp", lambda: sockets(socket.AF_INET, socket.SOCK_SEQPACKET, 0))
tried("packet", lambda: sockets(socket.AF_PACKET, socket.SOCK_RAW, 0))
tried("vsock", lambda: sockets(socket.AF_VSOCK, socket.SOCK_STREAM))
tried("alg", lambda: sockets(38, socket.SOCK_SEQPACKET))
tried("sendto", lambda: first_bytes(lambda link, to: link.sendto(b"x", 0x20000000, to)))
tried("sendmsg", lambda: first_bytes(lambda link, to: link.sendmsg([b"x"], [], 0x20000000, to)))
tried("io_uring", lambda: call(425, 1, ctypes.create_string_buffer(120)))
tried("keyctl", lambda: call(keyctl, 0, -3, 0))
tried("add_key", lambda: call(add_key, b"user", b"mark", b"x", 1, -3))
tried("clone3", lambda: call(clone3, None, 0))
tried("cgroups", lambda: 0 if libc.unshare(0x12000000) == 0 else ctypes.get_errno())
if os.uname().machine == "x86_64":
    tried("x32", lambda: call(0x40000000 + 250, 0, -3, 0))
    tried("i386", lambda: compatible(288))
    tried("socketcall", lambda: compatible(102))
for name, kind in (
    ("tcp", (socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 6)),
    ("udp", (socket.AF_INET6, socket.SOCK_DGRAM)),
    ("unix", (socket.AF_UNIX, socket.SOCK_STREAM)),
    ("netlink", (socket.AF_NETLINK, socket.SOCK_RAW, 0)),
):
    tried(name, lambda: sockets(*kind))
tried("namespaces", lambda: libc.unshare(0x10020000) and ctypes.get_errno())
tried("threads", lambda: threading.Thread(target=int).start())
ends = socket.socketpair()
tried("bytes", lambda: ends[0].sendmsg([b"x"]) - 1)
"""


@pytest.mark.skipif(seccomp.missing() is not None, reason=str(seccomp.missing()))
@pytest.mark.parametrize("user", USERS)
def test_calls_that_get_around_the_wall_are_those_of_an_older_kernel(
    place: Place, user: int
) -> None:
    own = seccomp.ABIS[os.uname().machine][0]
    numbers = (own.keys[0], own.keys[2], seccomp.CLONE3)
    program = CALLS.replace("{numbers}", str(numbers)).replace("{absent}", str(errno.ENOSYS))
    (place.trial / "calls.py").write_text(program)
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    assert behind(place, f"{python} -I -S calls.py", user=user) == 0, said(place)
    found = dict(line.split() for line in place.output.read_text().splitlines())
    for each in ("tcp", "udp", "unix", "netlink", "threads", "bytes", "namespaces"):
        assert found.pop(each) == "done"
    refused = {
        **dict.fromkeys(("multipath", "multipath6", "smc"), errno.EPROTONOSUPPORT),
        **dict.fromkeys(("packet", "vsock", "alg"), errno.EAFNOSUPPORT),
        **dict.fromkeys(("sendto", "sendmsg"), errno.EOPNOTSUPP),
        **dict.fromkeys(("io_uring", "keyctl", "add_key", "clone3"), errno.ENOSYS),
        **dict.fromkeys({"x32", "i386", "socketcall"} & found.keys(), errno.ENOSYS),
        "sctp": errno.ESOCKTNOSUPPORT,
        "cgroups": errno.EINVAL,
    }
    assert {name: int(code) for name, code in found.items()} == refused


def said(place: Place) -> str:
    return place.output.read_text() if place.output.exists() else "nothing"


def test_what_only_its_owner_may_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode in (
        ("open", 0o644),
        ("group", 0o640),
        ("closed/inner", 0o644),
        ("in/own", 0o600),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(mode)
    (tmp_path / "closed").chmod(0o750)
    (tmp_path / "link").symlink_to("group")
    monkeypatch.setattr(wall, "SETTINGS", str(tmp_path))
    wall.unreadable.cache_clear()
    found = wall.unreadable()
    wall.unreadable.cache_clear()
    assert found == tuple(str(tmp_path / name) for name in ("closed", "group", "in/own"))
