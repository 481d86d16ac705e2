"""A process between the proxy and a server that it started, which ends the server in any event.

A separate program that imports only the standard library: `python -I -S guard.py PARENT GRACE_S
[--stdin FD] ARGV…`. The server's standard input is descriptor FD, or empty. The guard ends the
server (SIGTERM to its process group, then SIGKILL to all its descendants) when its own standard
input closes, when it gets SIGTERM, when process PARENT ends (also by `kill -9`), and when the
server's main process ends. It exits with the server's exit code, or 128 + N for signal N.
Invariant: when the guard has exited, no descendant of the server is alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    parent, grace_s, argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    stdin_fd = None
    if argv[0] == "--stdin":
        stdin_fd, argv = int(argv[1]), argv[2:]
    _prctl(PR_SET_DUMPABLE, 0)  # the server may have a pipe with a secret
    parent_fd = os.pidfd_open(parent)
    wake_fd = _wake_on(signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return 1
    server = _start(argv, stdin_fd)
    server_fd = os.pidfd_open(server)
    _wait((server_fd, wake_fd, parent_fd, sys.stdin.fileno()), None)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGTERM)
    _wait((server_fd,), grace_s)
    status = _end_everything(server)
    return status if status >= 0 else 128 - status


def _start(argv: list[str], stdin_fd: int | None) -> int:
    # A signal that is sent at once waits until the server has a group and handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    guard = os.getpid()
    server = os.fork()
    if server:
        with contextlib.suppress(OSError):  # it has done so, or has ended
            os.setpgid(server, server)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return server
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == guard:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin_fd is None else stdin_fd, 0)
        if stdin_fd is not None:
            os.close(stdin_fd)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error}\n".encode())
    os._exit(127)


def _wake_on(number: signal.Signals) -> int:
    """A file descriptor that becomes readable when the signal arrives."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_fd)
    return read_fd


def _wait(fds: tuple[int, ...], timeout_s: float | None) -> None:
    """Waits until one of the descriptors is readable or closed, or until the timeout."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    poll.poll(None if timeout_s is None else timeout_s * 1000)


def _end_everything(server: int) -> int:
    """Kills and reaps until there is no child left; returns the server's exit code."""
    code = 1
    while True:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="utf-8") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                pending += children
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.exit(main())
