"""The server that forks a supervisor for each job: an agent, a verifier or a grader.

A program that imports the standard library only (`python -I -S job_server.py FD WALL`, where FD is
a socket and WALL the file of `proxy/wall.py`); for agents that are Python functions,
`function_server.py` runs it with their module imported. A request is the number of the job's rule
set and the descriptors of the supervisor (`supervisor.py`). `ProcessHost` in `host.py` is the
caller. A fork takes a millisecond, even where the agent's module takes seconds to import.

    server ─fork─▶ supervisor ─fork─▶ agent
      └─fork─▶ restricted server, which has taken a rule set ─fork─▶ supervisor ─fork─▶ agent

To inherit a rule set from the parent costs a process nothing. To take one itself costs it 20 ms,
because the kernel copies a rule for each of 65,000 ports. So a restricted server takes it for all
agents behind a light wall. An agent behind a strict wall takes it itself, because a process with a
rule set cannot join a sandbox that was started without it.

Invariant: a job is run by a server with its rule set, and holds none of the servers' sockets.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Job = dict[str, Any]
Body = Callable[[Job, int], None]
"""The function that the agent's process runs once it is set up; it does not return. Its second
argument is the descriptor for the reason why the agent could not be started."""

RULES = struct.Struct("i")
"""A request: the number of a rule set."""
NO_RULES = 0
MAX_FDS = 5
"""Descriptors of one job."""


def serve(server: socket.socket, body: Body | None, wall_file: str) -> None:
    """Forks a supervisor for each request, until the other end of the socket closes. `body`: None
    for jobs that are programs. `wall_file`: the file of `proxy/wall.py`."""
    supervisor = _loaded("supervisor", os.path.join(os.path.dirname(__file__), "supervisor.py"))
    _loaded(supervisor.WALL, wall_file)
    for name in (supervisor.LANDLOCK, supervisor.SECCOMP):
        _loaded(name, os.path.join(os.path.dirname(wall_file), "machine", f"{name}.py"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is forked
    gc.freeze()  # so that the collector does not copy shared pages in forks
    _serve(server, body or supervisor.execute, NO_RULES, supervisor)


def _serve(server: socket.socket, body: Body, own_rules: int, supervisor: Any) -> None:
    restricted: RestrictedServer | None = None
    while True:
        asked, fds, _, _ = socket.recv_fds(server, RULES.size, MAX_FDS)
        if not fds:
            return
        (rules,) = RULES.unpack(asked)
        if rules != own_rules:
            if restricted is None or not restricted.takes(rules, asked, fds):
                if restricted is not None:
                    restricted.socket.close()
                restricted = RestrictedServer(server, rules, fds, body, supervisor)
                restricted.takes(rules, asked, fds)
        elif os.fork() == 0:
            server.close()
            if restricted is not None:
                restricted.socket.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            supervisor.supervise(fds, body)
            os._exit(0)
        for fd in fds:
            os.close(fd)


class RestrictedServer:
    """A fork of the server that has taken a rule set, and serves the jobs with it until its socket
    closes."""

    def __init__(
        self, server: socket.socket, rules: int, fds: list[int], body: Body, supervisor: Any
    ) -> None:
        """`fds`: descriptors of the first job, of which the last is the rule set."""
        self.rules = rules
        self.socket, theirs = socket.socketpair()
        if os.fork() == 0:
            server.close()
            self.socket.close()
            try:
                sys.modules[supervisor.LANDLOCK].take_rules(fds[-1])
            except OSError as error:
                body = refusing(f"cannot refuse ports: {error}")
            for fd in fds:
                os.close(fd)
            _serve(theirs, body, rules, supervisor)
            os._exit(0)
        theirs.close()

    def takes(self, rules: int, asked: bytes, fds: list[int]) -> bool:
        """Passes on a request. False: it has another rule set, or was killed."""
        if rules != self.rules:
            return False
        try:
            socket.send_fds(self.socket, [asked], fds)
        except OSError:
            return False
        return True


def _loaded(name: str, file: str) -> Any:
    """Loads a module by its path, because this program cannot import the project's packages."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OSError(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def refusing(reason: str) -> Body:
    """The body of an agent that cannot be started."""

    def body(job: Job, error_fd: int) -> NoReturn:
        os.write(error_fd, reason.encode())
        os._exit(127)

    return body


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), None, sys.argv[2])
