"""A relay worker's command as a child process, which is told by standard input what to serve.

Invariant: the command ends with this process, also by `kill -9` (`proxy/engines/guard.py`), and its
standard input closes then, which ends what it started on another machine. The relay token is
written to no log, even if the command repeats its input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxy.engines import guard
from proxy.machine.secrecy import inherited
from trainer.errors import TrainerError
from trainer.extras.relay.order import WorkerOrder

NODE = (sys.executable, "-m", "trainer.cli", "relay-worker")
"""The command of a worker on this machine."""
STOP_GRACE_S = 15.0
"""Seconds for a worker to end after its order to do so: its own 5 s for calls, and vLLM's 10 s."""
TAIL_BYTES, TAIL_LINES = 4000, 3
MAX_LINE_BYTES = 2**20


class WorkerCommand:
    """Example: WorkerCommand(["ssh", "gpu-7", …], order, Path("logs/relay-0.log"))"""

    def __init__(
        self,
        argv: Sequence[str],
        order: WorkerOrder,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`log` is the file to which the command's standard output and error are appended.
        `environment` is added to this process's."""
        self._argv = list(argv)
        self._order = order
        self._log = log
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._orders_fd = -1
        self._copying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the command; it may take minutes until its worker is connected."""
        read_fd, self._orders_fd = os.pipe()
        try:
            self._write_order()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *("--stdin", str(read_fd), *self._argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=inherited() | self._environment,
                pass_fds=(read_fd,),
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # the run handles Ctrl-C
            )
        except BaseException:
            self._close_orders()
            raise
        finally:
            os.close(read_fd)
        assert self._process.stdout is not None
        self._copying = asyncio.create_task(self._copy(self._process.stdout))

    async def wait(self) -> str:
        """Returns when it has ended; the result says how, with the last lines of its log."""
        assert self._process is not None
        assert self._copying is not None
        code = await self._process.wait()
        await asyncio.shield(self._copying)
        return f"exit code {code}: {self.tail()} (log: {self._log})"

    async def stop(self) -> None:
        """Ends the command, and returns when it has ended."""
        self._close_orders()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
        if self._copying is not None:
            await self._copying

    def tail(self) -> str:
        """The last lines that the command wrote."""
        text = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-TAIL_LINES:]) or "without output"

    def _write_order(self) -> None:
        line = self._order.line()
        os.set_blocking(self._orders_fd, False)
        if os.write(self._orders_fd, line) < len(line):
            raise TrainerError(
                f"the order of {self._order.name} has {len(line)} bytes and does not fit into a "
                "pipe; make relay.workers.env, engine.env or engine.args shorter"
            )

    def _close_orders(self) -> None:
        if self._orders_fd >= 0:
            os.close(self._orders_fd)
            self._orders_fd = -1

    async def _copy(self, output: asyncio.StreamReader) -> None:
        """Copies the command's output to its log, without the token."""
        token = self._order.token.get_secret_value().encode()
        with self._log.open("ab", buffering=0) as log:
            while line := await _line(output):
                log.write(line.replace(token, b"(relay token)"))


def on_this_machine(order: WorkerOrder, log: Path) -> WorkerCommand:
    """A worker as a process of this machine."""
    return WorkerCommand(NODE, order, log)


async def _line(output: asyncio.StreamReader) -> bytes:
    """The next line, or the part of it that fits into memory; empty at the end."""
    try:
        return await output.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await output.readexactly(error.consumed)
