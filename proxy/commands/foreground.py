"""Runs an agent's program in the foreground, behind the light wall (`wall.py`).

Invariant: when `run_agent` returns or raises, no process behind the wall is alive. Ctrl-C in a
terminal goes to the agent; SIGTERM and SIGINT to this process end the agent, with SIGKILL after
GRACE_S.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from proxy import wall
from proxy.errors import ConfigurationError

GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL."""
NOT_FOUND = 127
"""The exit code of a shell for a program that cannot be started."""


def run_agent(
    argv: Sequence[str], env: Mapping[str, str], hide: Sequence[str], *, walled: bool
) -> int:
    """Runs the program in the working folder of this process; returns its exit code, or minus the
    number of the signal that ended it. `hide` is empty for it if it is `walled`.

    Raises:
        ConfigurationError: this machine does not allow the wall.
    """
    if walled and (reason := wall.missing()) is not None:
        raise ConfigurationError(
            f"--sandbox light: this machine does not allow it ({reason}); allow namespaces, or"
            " give --sandbox off, with which the agent can read the proxy's files"
        )
    folder = os.getcwd()
    terminal = sys.stdin.fileno() if _is_foreground() else None

    def become() -> NoReturn:
        os.chdir(folder)
        if terminal is not None:
            _take(terminal, os.getpgrp())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(NOT_FOUND)

    with _ended_by_signals() as started:
        pid = os.fork()
        if pid == 0:
            _child(hide, become, walled=walled)
        with suppress(OSError):  # it has done so, or has ended
            os.setpgid(pid, pid)
        started(pid)
        _, status = os.waitpid(pid, 0)
    if terminal is not None:
        _take(terminal, os.getpgrp())
    return os.waitstatus_to_exitcode(status)


def _child(hide: Sequence[str], become: Callable[[], NoReturn], *, walled: bool) -> NoReturn:
    """In the fork: the gate of the wall, or the agent itself."""
    try:
        os.setpgid(0, 0)
        if walled:
            wall.enter(hide, become)
        become()
    except OSError as error:
        os.write(2, f"agentic-proxy: cannot build the wall: {error}\n".encode())
    os._exit(NOT_FOUND)


@contextmanager
def _ended_by_signals() -> Iterator[Started]:
    """While the block runs, SIGINT and SIGTERM end the process group that it started."""
    started = Started()
    before = {n: signal.signal(n, started.end) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield started
    finally:
        started.forget()
        for number, handler in before.items():
            signal.signal(number, handler)


class Started:
    """The agent's process group, which signals end."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._asked = False
        self._killer: threading.Timer | None = None

    def __call__(self, pid: int) -> None:
        self._pid = pid
        if self._asked:  # the signal came while the process was started
            self._terminate(pid)

    def end(self, *_: object) -> None:
        self._asked = True
        if self._pid is not None:
            self._terminate(self._pid)

    def forget(self) -> None:
        self._pid = None
        if self._killer is not None:
            self._killer.cancel()

    def _terminate(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        if self._killer is None:
            self._killer = threading.Timer(GRACE_S, os.killpg, (pid, signal.SIGKILL))
            self._killer.start()


def _is_foreground() -> bool:
    """Whether a terminal is the standard input and this process may give it to the agent."""
    return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


def _take(terminal: int, group: int) -> None:
    """Makes a process group the one that reads the terminal and gets its Ctrl-C."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, before)
