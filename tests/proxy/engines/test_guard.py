"""The guard ends all descendants of a server, including those that left its session."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from proxy.engines import guard

# Starts a child that leaves the process group and session; both print their pids and wait.
SERVER = """
import os, signal, sys
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
signal.pause()
"""
# Takes the proxy's place: starts a guard, passes on its output, and waits to be killed.
PARENT = """
import os, signal, subprocess, sys
from proxy.engines import guard
subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0.2",
                  sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
signal.pause()
"""


def guarded(code: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0.2"]
    return subprocess.Popen(
        [*argv, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def server_pidfds(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]


def all_end(pidfds: list[int]) -> bool:
    ended = all(select.select([fd], [], [], 20)[0] for fd in pidfds)
    for fd in pidfds:
        os.close(fd)
    return ended


def close_stdin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("stop", [close_stdin, lambda process: process.send_signal(signal.SIGTERM)])
def test_stop_ends_the_server_and_a_child_in_another_session(
    stop: Callable[[subprocess.Popen[str]], None], stubborn: bool
) -> None:
    with guarded(SERVER.format(stubborn=stubborn)) as process:
        pidfds = server_pidfds(process)
        stop(process)
        assert all_end(pidfds)


def test_stop_at_any_moment_of_the_start_ends_the_server_at_once() -> None:
    """The signal must not be sent before the server has a group, or before it can end by it."""
    argv = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "600"]
    for _ in range(20):
        # A stop that is there before the server is started.
        process = subprocess.Popen([*argv, "/bin/sleep", "600"], stdin=subprocess.DEVNULL)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_kill_9_of_the_parent_ends_all_processes() -> None:
    argv = [sys.executable, "-c", PARENT, SERVER.format(stubborn=False)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        pidfds = server_pidfds(parent)
        parent.kill()
        assert all_end(pidfds)


def test_kill_9_of_the_guard_ends_the_server() -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with guarded(code) as process:
        assert process.stdout is not None
        server = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert all_end([server])


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_servers_exit_code_is_passed_on(code: str, expected: int) -> None:
    with guarded(code) as process:
        assert process.wait() == expected


def test_program_that_does_not_exist_is_reported() -> None:
    argv = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "0.2", "no-such-program"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.stderr is not None
        assert "no-such-program" in ended.stderr.read()
        assert ended.wait() == 127
