"""The trainer as a child process of the swarm server.

Invariant: the server knows at once when the trainer ends. The engine's state is then `error`,
unless the end was asked for or the training is done. The trainer ends with the server, also when
the server is killed (`proxy/engines/guard.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.wire import EngineState
from proxy.engines import guard
from proxy.machine.secrecy import from_pipe, inherited, pipe_with

URL_VARIABLE = "AGENTIC_SWARM_URL"
KEY_FD_VARIABLE = "AGENTIC_SWARM_TRAINER_KEY_FD"
"""The number of the descriptor from which the trainer reads its key."""
STOP_GRACE_S = 30.0
"""Seconds that the trainer may take to save its state and to end its engines."""
LOG_TAIL_BYTES = 1500


def server_of_trainer() -> tuple[str, str] | None:
    """URL of the server that started this process, and its key, which can be read once; None: no
    server did."""
    url, fd = os.environ.get(URL_VARIABLE), os.environ.get(KEY_FD_VARIABLE)
    return (url, from_pipe(int(fd))) if url and fd else None


class TrainerProcess:
    """`begin` and `resume` are the commands that start the trainer, which then says hello to the
    swarm's server. `{run_dir}` in `resume` becomes the run's folder."""

    def __init__(
        self, swarm: Swarm, begin: Sequence[str], resume: Sequence[str], log: Path
    ) -> None:
        self._swarm = swarm
        self._begin = list(begin)
        self._resume = list(resume)
        self.url = ""
        """Where the trainer reaches the server."""
        self.key = ""
        """By which the server knows its trainer."""
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False
        self._changing = asyncio.Lock()
        """Held by a start and by a stop."""

    async def start(self, run_dir: str) -> None:
        """Resumes the run in `run_dir`; empty, or without such a folder: begins a new run.

        Raises `state` if it was stopped since `Swarm.begin`.
        """
        async with self._changing:
            if self._swarm.state is not EngineState.BOOTING:
                raise SwarmError("the engine was stopped before it had started", "state")
            await self._start(run_dir)

    async def stop(self) -> None:
        """Ends the trainer and waits for its end. Repeating this is not an error."""
        async with self._changing:
            self._stopping = True
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
            if self._watch is not None:
                await asyncio.wait([self._watch])
            if self._swarm.state not in (EngineState.OFFLINE, EngineState.DONE):
                await self._swarm.trainer_ended(EngineState.OFFLINE, "")

    async def _start(self, run_dir: str) -> None:
        self._stopping = False
        with self._log.open("ab") as log, pipe_with(self.key) as key_fd:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *self._command(run_dir),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=inherited() | {URL_VARIABLE: self.url, KEY_FD_VARIABLE: str(key_fd)},
                pass_fds=(key_fd,),
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._ended(self._process))

    def _command(self, run_dir: str) -> list[str]:
        if run_dir and self._resume and Path(run_dir).is_dir():
            return [part.replace("{run_dir}", run_dir) for part in self._resume]
        return self._begin

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._process = None
        try:
            if self._stopping:
                await self._swarm.trainer_ended(EngineState.OFFLINE, "")
            elif code == 0:
                with contextlib.suppress(SwarmError):  # a full disk: the next start resumes it
                    await self._swarm.set_run_dir("")
                await self._swarm.trainer_ended(EngineState.DONE, "the training is done")
            else:
                await self._swarm.trainer_ended(
                    EngineState.ERROR, f"exit code {code}: {self._last_words()}; see {self._log}"
                )
        finally:
            self._watch = None

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "the log is empty"
