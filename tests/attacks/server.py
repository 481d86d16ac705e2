"""A server under attack: its process, its log, its memory, and the processor time that it uses."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

IDLE_S, BUSY_S = 20.0, 2.0
"""Work hangs if it is not done and, for IDLE_S, the server and this program together have used or
waited for less than BUSY_S of processor time."""
PROCESSOR_S = 40.0
"""Work hangs, too, if it is not done after the server has used this processor time."""
T = TypeVar("T")
ADDRESS = re.compile(r"([\w.]+):(\d+)")


@dataclass(frozen=True, slots=True)
class Effort:
    """What processes have done since they started, in seconds of their threads."""

    used_s: float
    """Processor time."""
    waited_s: float
    """Time in which a thread could run and waited for a processor: large on a busy machine."""

    @property
    def total_s(self) -> float:
        return self.used_s + self.waited_s


class Hang(Exception):
    """A server does not do its work although it could."""


@dataclass(slots=True)
class Server:
    host: str
    port: int
    pid: int
    log: Path
    peak_rss_bytes: int = field(default=0, kw_only=True)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def rss_bytes(self) -> int:
        """Resident memory now; the peak of all calls is kept."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        rss = int(status.partition("VmRSS:")[2].split()[0]) * 1024
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        return rss

    def effort(self) -> Effort:
        """Of the server's process and its descendants."""
        return effort(family(self.pid))

    def tracebacks(self) -> list[str]:
        """The last line of each traceback in the log, and the last place in our code."""
        parts = self.log.read_text(errors="replace").split("Traceback (most recent call last)")
        return [_last_of_traceback(part) for part in parts[1:]]


@asynccontextmanager
async def running_server(*argv: str, log: Path, **variables: str) -> AsyncIterator[Server]:
    """`python -m argv…`, once it has written its URL. `variables` are added to its environment."""
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *argv),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=os.environ | variables,
        )
    try:
        host, port = await _address(process, log)
        yield Server(host, port, process.pid, log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def patiently(server: Callable[[], Effort], work: Coroutine[None, None, T]) -> T:
    """Waits as long as the server is busy, so that a busy machine is not taken for a hang.

    Raises Hang: see IDLE_S and PROCESSOR_S.
    """
    task = asyncio.ensure_future(work)
    try:
        start = last = server()
        ours = effort([os.getpid()])
        while not (await asyncio.wait([task], timeout=IDLE_S))[0]:
            now, ours_now = server(), effort([os.getpid()])
            done_s = now.total_s - last.total_s + ours_now.total_s - ours.total_s
            if done_s < BUSY_S:
                raise Hang(f"nothing in {IDLE_S:.0f} s of an idle server")
            if now.used_s - start.used_s > PROCESSOR_S:
                raise Hang(f"nothing while the server worked for {PROCESSOR_S:.0f} s")
            last, ours = now, ours_now
        return task.result()
    finally:
        task.cancel()


def effort(pids: Sequence[int]) -> Effort:
    used_ns = waited_ns = 0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                used, waited, _ = _numbers(task / "schedstat")
                used_ns, waited_ns = used_ns + used, waited_ns + waited
    return Effort(used_ns / 1e9, waited_ns / 1e9)


def _numbers(path: Path) -> tuple[int, int, int]:
    try:
        used, waited, slices = map(int, path.read_text().split())
    except OSError:  # the thread has ended
        return 0, 0, 0
    return used, waited, slices


def family(pid: int) -> list[int]:
    return [pid, *_descendants(pid)]


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):  # the process has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    """The next line that a process writes; empty if it has ended. Raises Hang."""
    assert process.stdout is not None
    return await patiently(lambda: effort(family(process.pid)), process.stdout.readline())


async def _address(process: asyncio.subprocess.Process, log: Path) -> tuple[str, int]:
    while line := (await line_of(process)).decode():
        _, found, rest = line.partition("http://")
        if found:
            host, port = ADDRESS.match(rest).groups()
            return host, int(port)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _last_of_traceback(part: str) -> str:
    lines = part.splitlines()
    end = next((n for n, line in enumerate(lines) if n and line and line[0] != " "), len(lines) - 1)
    files = [line.strip() for line in lines[:end] if line.startswith("  File ")]
    ours = [line for line in files if "site-packages" not in line and "/lib/python" not in line]
    return f"{lines[end][:200]} (from {ours[-1:]}, raised in {files[-1:]})"
