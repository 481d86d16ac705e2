"""vLLM servers that start before it is known what they serve.

A program that starts servers may itself import for seconds before it has read its configuration. A
server that `begin` started imports vLLM meanwhile, and then waits. `VllmServer` takes it instead of
starting another one, if it was begun with the variables that the configuration asks for.

Invariant: like every server, an early one never outlives this process (`guard.py`), and `end_all`
ends those that nobody took.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Set

from proxy.engines import guard
from proxy.engines.vllm_launch import EarlyOrders
from proxy.machine.secrecy import LatePipe, inherited

_waiting: list[EarlyServer] = []


class EarlyServer:
    """The process of a server, with as much of `asyncio.subprocess.Process` as `VllmServer` uses:
    there may be no event loop yet when it starts."""

    def __init__(self, asked: Mapping[str, str], grace_s: float) -> None:
        """`asked`: variables to set besides those of this process. `grace_s`: seconds between
        SIGTERM and SIGKILL."""
        self.asked = asked
        self.environment = {**inherited(), **asked}
        self._orders = LatePipe()
        with self._orders.to_child() as fd, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(grace_s)),
                    *(sys.executable, "-m", "proxy.engines.vllm_launch", str(fd)),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment,
                pass_fds=(fd,),
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        assert self._process.stdin is not None
        self.stdin = self._process.stdin

    def order(self, orders: EarlyOrders) -> None:
        """Tells the server what it serves. To be called once."""
        self._orders.write(json.dumps(orders))

    @property
    def pid(self) -> int:
        """The process id of its guard."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        """Returns its exit code when it has ended."""
        loop = asyncio.get_running_loop()
        while (code := self.returncode) is None:
            ended = asyncio.Event()
            fd = os.pidfd_open(self._process.pid)
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return code

    def end(self) -> None:
        """Ends it without orders, and returns when all of its processes have ended."""
        self.stdin.close()
        self._process.wait()
        self._orders.close()


def begin(count: int, asked: Mapping[str, str], grace_s: float) -> list[EarlyServer]:
    """Starts servers, which wait for `taken`."""
    begun = [EarlyServer(asked, grace_s) for _ in range(count)]
    _waiting.extend(begun)
    return begun


def taken(asked: Mapping[str, str], late: Set[str] = frozenset()) -> EarlyServer | None:
    """A server that was begun, for the caller to `order`; None if there is none. One that was begun
    with other variables than these is ended, those aside that it can still get (`late`). What
    libraries have set in this process since then (importing PyTorch's compiler sets some) does not
    count."""
    if not _waiting:
        return None
    early = _waiting.pop()
    differ = {k for k, _ in asked.items() ^ early.asked.items()}
    if differ <= late and early.asked.keys() <= asked.keys() and early.returncode is None:
        return early
    early.end()
    return None


def end_all() -> None:
    """Ends the servers that were not taken."""
    while _waiting:
        _waiting.pop().end()
