"""Secrets reach a child, and nobody else of the same user."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from harbor_sdk.server import guard as harbor_guard
from proxy.machine import secrecy
from proxy.machine.secrecy import from_pipe, inherited, pipe_with

SECRET = "a secret that is longer than a pipe holds; " * 4000
READER = """
import sys
from proxy.machine.secrecy import from_pipe
print(len(from_pipe(int(sys.argv[1]))))
"""
NOBODY = 65534


def test_child_reads_a_secret_of_any_length_from_a_pipe() -> None:
    with pipe_with(SECRET) as fd:
        child = subprocess.run(
            [sys.executable, "-c", READER, str(fd)], pass_fds=(fd,), capture_output=True, check=True
        )
    assert int(child.stdout) == len(SECRET)


def test_secret_can_be_read_once() -> None:
    with pipe_with("secret") as fd:
        assert from_pipe(os.dup(fd)) == "secret"
        assert os.read(fd, 1) == b""


def test_child_that_does_not_read_holds_nobody_up() -> None:
    with pipe_with(SECRET):
        pass


def test_variables_with_our_secrets_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in secrecy.VARIABLES:
        monkeypatch.setenv(name, "secret")
    assert "secret" not in inherited().values()
    assert inherited()["PATH"] == os.environ["PATH"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes as another user")
@pytest.mark.parametrize("hide", [secrecy.hide_memory, harbor_guard.hide_memory])
def test_hidden_process_cannot_be_read_by_its_own_user(hide: Callable[[], None]) -> None:
    assert not _refused_to_its_user(lambda: None)
    assert _refused_to_its_user(hide) == ["environ", "mem", "fd/0"]


def _refused_to_its_user(hide: Callable[[], None]) -> list[str]:
    """Which of its files in /proc a process keeps from another one of the same user."""
    holds, ready = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(holds[1])
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(secrecy.PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after an exec
        hide()
        os.write(ready[1], b"!")
        os.read(holds[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    refused = [
        what
        for what in ("environ", "mem", "fd/0")
        if b"Permission denied"
        in subprocess.run(
            ["dd", f"if=/proc/{pid}/{what}", "count=0"],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            check=False,
        ).stderr
    ]
    for fd in (*holds, *ready):
        os.close(fd)
    os.waitpid(pid, 0)
    return refused
