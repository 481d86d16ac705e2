"""The small processes between us and agents: start them, bound them, and end all of them.

A program of its own that imports the standard library only (`python -I -S supervisor.py`), or,
for agents that are Python functions, their module too. It is a *server*: for three descriptors
that come over its socket it forks one *supervisor*, which reads a JSON job from the first (a
file), starts the agent, and writes one JSON line about the agent's end to the third; the second
tells it to end the agent.
`ProcessHost` in `processes.py` is its caller. Forking costs a millisecond, also where the agent's
module takes seconds to import.

Invariant: when a supervisor exits, no descendant of its agent lives. It is the *child subreaper*
of everything below it (prctl(2)), so a daemon that forks twice, opens a session of its own and
clears its environment still becomes its child, and is found and killed. It ends the agent when
the second descriptor closes: on cancellation, and when whoever started it dies, `kill -9`
included. If it is killed itself, the agent dies with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 20
Job = dict[str, Any]
Body = Callable[[Job, int], None]
"""What the agent's process does once it is set up; it does not return."""

REAP_TIMEOUT_S = 10.0
"""For killed processes to be gone; one that waits for a dead disk may never be."""


def serve(server: socket.socket, body: Body) -> None:
    """Forks a supervisor per request, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    gc.freeze()  # keeps the collector from copying every shared page in the forked
    while True:
        _, fds, _, _ = socket.recv_fds(server, 1, 3)
        if not fds:
            return
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            supervise(fds[0], fds[1], fds[2], body)
            os._exit(0)
        for fd in fds:
            os.close(fd)


def supervise(job_fd: int, cancel_fd: int, report_fd: int, body: Body) -> None:
    with open(job_fd, "rb") as file:
        job = json.load(file)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Before the fork, so that no child's end is missed; the agent gets an empty mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        agent = Agent(job, body, (cancel_fd, report_fd))
    except OSError as error:
        _report(report_fd, launch_error=str(error))
        return
    ended_by = _watch(agent, cancel_fd, job["timeout_s"], job["grace_s"])
    wall_s = time.monotonic() - agent.started
    status, left_over = _end_everything(agent.pid)
    agent.drain()
    agent.log.close()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    _report(
        report_fd,
        ended_by=ended_by,
        exit_code=os.waitstatus_to_exitcode(status) if status is not None else None,
        wall_s=wall_s,
        left_over=left_over,
        output_bytes=agent.log.total_bytes,
        cpu_s=usage.ru_utime + usage.ru_stime,
        supervisor_cpu_s=own.ru_utime + own.ru_stime,
        peak_memory_bytes=usage.ru_maxrss * 1024,
    )


class Agent:
    """The agent's main process and its output."""

    def __init__(self, job: Job, body: Body, private_fds: tuple[int, ...]) -> None:
        self.started = time.monotonic()
        self.log = BoundedLog(job["log"], job["log_bytes"])
        self.output_fd, write_fd = os.pipe()
        error_fd, error_write_fd = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (*private_fds, self.output_fd, self.log.fileno(), error_fd):
                os.close(fd)
            _become_agent(job, body, write_fd, error_write_fd, parent)
        os.close(write_fd)
        os.close(error_write_fd)
        if error := os.read(error_fd, READ_BYTES):
            raise OSError(error.decode())
        os.close(error_fd)
        self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def drain(self) -> None:
        """Reads what is left in the pipe; nobody holds its other end any more."""
        os.set_blocking(self.output_fd, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output_fd, READ_BYTES):
                self.log.write(data)


class BoundedLog:
    """Keeps the first and the last half of `limit_bytes`, and says how much lay between."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._tail = bytearray()
        self.total_bytes = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: bytes) -> None:
        room = max(self._head_bytes - self.total_bytes, 0)
        self.total_bytes += len(data)
        if room:
            self._file.write(data[:room])
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def close(self) -> None:
        lost = len(self._tail) - self._tail_bytes
        between = self.total_bytes - self._head_bytes - self._tail_bytes
        if between > 0:
            self._file.write(b"\n[... %d bytes not kept ...]\n" % between)
            del self._tail[:lost]
        self._file.write(self._tail)
        self._file.close()


def _watch(agent: Agent, cancel_fd: int, timeout_s: float, grace_s: float) -> str:
    """Until the agent's main process ends: `exit`, `timeout` or `cancel`. At its deadline its
    process group gets SIGTERM, and after `grace_s` everything below us gets SIGKILL.
    """
    poll = select.poll()
    for fd in (agent.pidfd, agent.output_fd, cancel_fd):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    ended_by = "exit"
    deadline = agent.started + timeout_s
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            if ended_by != "exit":
                return ended_by
            ended_by, deadline = "timeout", time.monotonic() + grace_s
            agent.signal(signal.SIGTERM)
            continue
        ready = {fd for fd, _ in poll.poll(remaining_s * 1000 + 1)}
        if agent.output_fd in ready:
            data = os.read(agent.output_fd, READ_BYTES)
            agent.log.write(data)
            if not data:
                poll.unregister(agent.output_fd)
        if agent.pidfd in ready:
            return ended_by
        if cancel_fd in ready:
            poll.unregister(cancel_fd)
            ended_by, deadline = "cancel", time.monotonic() + grace_s
            agent.signal(signal.SIGTERM)


def _end_everything(agent_pid: int) -> tuple[int | None, int]:
    """Reaps and kills until there is no child.

    Returns the agent's wait status (None if it did not go within REAP_TIMEOUT_S), and how many
    other processes were found alive.
    """
    status: int | None = None
    killed: set[int] = set()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == agent_pid:
                    status = reaped[1]
        except ChildProcessError:
            break
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    return status, len(killed - {agent_pid})


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                pending += children
    return found


def _become_agent(job: Job, body: Body, output_fd: int, error_fd: int, parent: int) -> None:
    """In the forked child: never returns. `error_fd` closes once the agent is running."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        null_fd = os.open(os.devnull, os.O_RDONLY)
        for fd, at in ((null_fd, 0), (output_fd, 1), (output_fd, 2)):
            os.dup2(fd, at)
        os.close(output_fd)
        os.close(null_fd)
        for name, value in job["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.chdir(job["cwd"])
        body(job, error_fd)
    except (OSError, ValueError) as error:
        os.write(error_fd, str(error).encode())
    os._exit(127)


def execute(job: Job, error_fd: int) -> None:
    """The body of an agent that is a program. `error_fd` is closed by exec."""
    # Python ignores these, which a program would inherit: `yes | head` would never end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(job["argv"][0], job["argv"], job["env"])


def _prctl(option: int, value: int) -> None:
    prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _report(report_fd: int, **fields: Any) -> None:
    os.write(report_fd, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), execute)
