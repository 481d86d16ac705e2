"""The trainer as a child of the swarm server.

Invariant: its end, however it comes, is known at once and is `error` unless it was asked for or it
was done; it ends with the server, also where the server is killed (`proxy/engines/guard.py`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_loop.swarm.swarm import Swarm
from agent_loop.swarm.wire import EngineState
from proxy.engines import guard

STOP_GRACE_S = 30.0
"""For the trainer to save and end its engines."""
LOG_TAIL_BYTES = 1500


class TrainerProcess:
    """`begin` and `resume` start the trainer, which says hello to the swarm's server by itself;
    `{run_dir}` in `resume` becomes the run to go on from, and none at all: it begins again."""

    def __init__(
        self, swarm: Swarm, begin: Sequence[str], resume: Sequence[str], log: Path
    ) -> None:
        self._swarm = swarm
        self._begin = list(begin)
        self._resume = list(resume)
        self.env: dict[str, str] = {}
        """What the trainer gets beside our own variables: how it reaches us."""
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, run_dir: str) -> None:
        """Goes on from `run_dir`, if there is one."""
        self._stopping = False
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *self._command(run_dir),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        self._watch = asyncio.create_task(self._ended(self._process))

    async def stop(self) -> None:
        """Returns when it is gone. Again is no error."""
        self._stopping = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._watch is not None:
            await asyncio.wait([self._watch])
        else:
            self._swarm.set_state(EngineState.OFFLINE)

    def _command(self, run_dir: str) -> list[str]:
        if run_dir and self._resume and Path(run_dir).is_dir():
            return [part.replace("{run_dir}", run_dir) for part in self._resume]
        return self._begin

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._process = self._watch = None
        if self._stopping:
            await self._swarm.trainer_ended(EngineState.OFFLINE, "")
        elif code == 0:
            await self._swarm.set_run_dir("")
            await self._swarm.trainer_ended(EngineState.OFFLINE, "the training is done")
        else:
            await self._swarm.trainer_ended(
                EngineState.ERROR, f"exit code {code}: {self._last_words()}; see {self._log}"
            )

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
