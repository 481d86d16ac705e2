"""Runs one program under `supervisor.py`: an agent, a verifier.

Invariant: when `run_supervised` returns, raises or is cancelled, every process that came of the
program is ended, however it detached itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.errors import LaunchError
from agent_loop.launchers import supervisor

END_TIMEOUT_S = supervisor.REAP_TIMEOUT_S + 10.0
"""Beyond the program's grace, for the supervisor to report; then it is killed itself."""


class Limits(BaseModel):
    """What the kernel refuses to each process of a program (setrlimit); None is our own limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int | None = Field(None, gt=0)
    """Seconds of processor time, after which the process is killed."""
    memory_bytes: int | None = Field(None, gt=0)
    """Address space: allocations beyond it fail."""
    file_bytes: int | None = Field(None, gt=0)
    """Size of any one file that it writes."""
    open_files: int | None = Field(None, gt=0)

    def as_rlimits(self) -> dict[str, int]:
        named = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Job:
    """A program to run.

    Example: Job(argv=["python", "agent.py"], cwd=Path("trial/work"), env={"PATH": "…"},
                 log=Path("trial/agent.log"), timeout_s=60.0)
    """

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    """Standard output and error, interleaved, its middle left out beyond `log_bytes`."""
    timeout_s: float
    grace_s: float = 5.0
    """Between SIGTERM to its process group and SIGKILL to everything that came of it."""
    log_bytes: int = 1 << 20
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. Example: Ended("timeout", exit_code=-9, wall_s=65.0, left_over=2, …)"""

    ended_by: str
    """`exit` (by itself), `timeout` or `cancel`."""
    exit_code: int | None
    """Negative: the signal that killed it. None: it could not be killed."""
    wall_s: float
    left_over: int
    """Processes that it left behind, now killed."""
    output_bytes: int
    """Printed in all, kept or not."""
    cpu_s: float
    peak_memory_bytes: int
    """Of its largest process."""

    @property
    def failure(self) -> str | None:
        """One line, or None where the program ended by itself with exit code 0."""
        if self.ended_by == "timeout":
            return f"ended by us at its deadline, after {self.wall_s:.1f} s"
        if self.exit_code == 0:
            return None
        if self.exit_code is None:
            return "could not be killed"
        return f"exit code {self.exit_code}" if self.exit_code > 0 else _signal(-self.exit_code)


async def run_supervised(job: Job) -> Ended:
    """Runs the program to its end or its deadline.

    Raises:
        LaunchError: it could not be started, or its supervisor was killed.
    """
    process = _start(job)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        report = asyncio.ensure_future(_read(process.stdout))
        try:
            raw = await asyncio.shield(report)
        except asyncio.CancelledError:
            process.stdin.close()
            await _last_report(report, process, job.grace_s)
            raise
    finally:
        process.stdin.close()
        process.stdout.close()
    process.wait()
    return _parse(job, raw)


def _start(job: Job) -> subprocess.Popen[bytes]:
    fields = {
        "argv": [str(part) for part in job.argv],
        "cwd": str(job.cwd),
        "env": dict(job.env),
        "log": str(job.log),
        "log_bytes": job.log_bytes,
        "timeout_s": job.timeout_s,
        "grace_s": job.grace_s,
        "limits": job.limits.as_rlimits(),
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env={},
        # A Ctrl-C is ours to act on: the terminal's SIGINT must not reach agents first.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: its report says why
        process.stdin.write(json.dumps(fields).encode() + b"\n")
    return process


async def _read(pipe: IO[bytes]) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


async def _last_report(
    report: asyncio.Future[bytes], process: subprocess.Popen[bytes], grace_s: float
) -> None:
    """After a cancellation: until everything is ended."""
    await asyncio.wait([report], timeout=grace_s + END_TIMEOUT_S)
    if not report.done():
        process.kill()
        await asyncio.wait([report])
    process.wait()


def _parse(job: Job, raw: bytes) -> Ended:
    try:
        fields = json.loads(raw)
    except json.JSONDecodeError:
        told = raw.decode(errors="replace").strip().splitlines()
        raise LaunchError(
            f"the supervisor of {job.argv[0]!r} died: {told[-1] if told else 'it was killed'}"
        ) from None
    if "launch_error" in fields:
        raise LaunchError(f"cannot start {job.argv[0]!r} in {job.cwd}: {fields['launch_error']}")
    return Ended(**fields)


def _signal(number: int) -> str:
    return f"killed by signal {number}"
