"""Processes of a test that begin with the trainer, torch and transformers imported.

A process that is started anew imports them again, which takes 10 s of processor time and more,
often longer than all that it is to show. Here one process, which only imports, is forked for each
of them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = [
    "pytest",  # a child imports the main module of its parent
    "trainer.policy.policy",
    "trainer.learning.models",
    "transformers.models.auto",
    "trainer.start",
    "trainer.fit",
    "trainer.cluster.local",
    "trainer.cluster.rank_models",
    "trainer.cluster.services",
    "trainer.mains.colocated",
    "trainer.mains.separate",
]


def context() -> ForkServerContext:
    """Of multiprocessing, whose processes are forked from the one that imports."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    return found


class ForkedProgram:
    """`python -m MODULE ARGUMENT…` in a session of its own, with the methods of a Popen.

    Example:
        program = ForkedProgram("trainer.cli", "--config", "a.yaml", log=log, env=os.environ)
        assert program.wait() == 0
    """

    def __init__(self, module: str, *arguments: str, log: Path, env: Mapping[str, str]) -> None:
        """`log` gets what the program prints."""
        self._process = context().Process(target=_run, args=(module, arguments, log, dict(env)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
        return self._process.exitcode


def _run(module: str, arguments: tuple[str, ...], log: Path, env: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.close(written)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
