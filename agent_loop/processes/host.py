"""Runs programs and functions in processes of their own: agents, verifiers, graders.

Every process of an agent, a verifier or a grader is started here. Invariant: when `ProcessHost.run`
returns, raises or is cancelled, all descendants of the job have ended, even those that detached
themselves (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from agent_loop.errors import LaunchError
from agent_loop.processes import job_server
from agent_loop.processes.environment import CERTIFICATES, inherited_environment, own_home
from agent_loop.processes.supervisor import REAP_TIMEOUT_S
from agent_loop.processes.threads import run_to_end
from harbor_sdk.sandbox import Bind, Sandbox, SandboxError, SandboxSpec
from proxy import wall
from proxy.machine import landlock
from proxy.machine.open_files import limit_at_start
from proxy.settings.section import Section
from proxy.wall import Wall

SERVER_ARGV = (sys.executable, "-I", "-S", job_server.__file__)

END_TIMEOUT_S = REAP_TIMEOUT_S + 10.0
"""Seconds that a cancellation waits for the supervisor's report, in addition to `grace_s`."""


class Limits(Section):
    """Limits of each process of a program (setrlimit), and of all of them behind a wall; None: the
    limit with which the trainer was started."""

    cpu_s: int | None = Field(None, gt=0)
    """Seconds of processor time, after which the process is killed."""
    memory_bytes: int | None = Field(None, gt=0)
    """Bytes of address space; larger allocations fail. Also of the memory of all processes
    together, past which the program is ended."""
    file_bytes: int | None = Field(None, gt=0)
    """Bytes of each file that the process writes. Also of all files in its working directory, home
    and `/tmp` together, past which the program is ended."""
    open_files: int | None = Field(None, gt=0)
    """Number of files that the process has open at the same time."""
    processes: int | None = Field(1024, ge=16)
    """Number of processes and threads of an agent behind a wall at the same time, together; a
    further one cannot be started. None: no limit."""
    shm_bytes: int = Field(256 << 20, ge=1 << 20)
    """Bytes of `/dev/shm` of an agent behind a wall."""

    def as_rlimits(self) -> dict[str, int]:
        """Of each process; the supervisor adds up what all of them use."""
        named = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
        }
        return {name: value for name, value in named.items() if value is not None}


class ProcessConfig(Section):
    """The processes in which agents run on this machine, or on a Ray node; with `http` and
    `kubernetes`, what of it the service or the cluster can keep.

    Example: ProcessConfig(pass_env=("PGPASSWORD",), limits=Limits(cpu_s=600))
    """

    pass_env: tuple[str, ...] = ()
    """Names of variables of the trainer's own environment that the agent gets, too. By default it
    gets a fixed list of variables (PATH, HOME, language, certificates, …) and no secret. With
    `python` they are also set while the function's module is imported."""
    grace_s: float = Field(5.0, ge=0)
    """Seconds between SIGTERM and SIGKILL at the deadline or a cancellation."""
    log_bytes: int = Field(1 << 20, ge=1024)
    """Bytes of the agent's output to keep: its first and its last half; with `http`, its end."""
    limits: Limits = Limits()


PROCESS = ProcessConfig()
"""The settings of a process if none are given."""


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
    """File for standard output and standard error, interleaved; of more than `log_bytes`, the
    middle is left out."""
    timeout_s: float
    grace_s: float = 5.0
    """Seconds between SIGTERM to its process group and SIGKILL to all its descendants."""
    log_bytes: int = 1 << 20
    limits: Limits = field(default_factory=Limits)
    stderr_log: Path | None = None
    """Additional file for standard error alone, bounded in the same way; None: no such file."""
    call: Mapping[str, Any] | None = None
    """A function call to make instead of starting a program (`function_server.py`)."""
    wall: Wall | None = None
    """The wall behind which the job runs; None: it sees what this process sees."""
    visible: Sequence[Path] = ()
    """Existing files and folders that are visible behind the wall, and writable."""
    kept: Sequence[tuple[Path, Path]] = ()
    """As `visible`, each at another path."""
    given: Sequence[Path] = ()
    """Existing files and folders that are visible behind the wall, read-only, also inside of hidden
    ones."""
    shown: Sequence[Path] = ()
    """As the wall's `show`."""
    seen_at: tuple[Path, Path] | None = None
    """A folder, and the path beside it at which a job behind a wall sees it. `argv`, `env`, `call`
    and `cwd` name the folder's own path."""

    @property
    def name(self) -> str:
        return self.argv[0] if self.argv else "call"

    def as_file(self, sandbox: int | None, descriptors: Sequence[str]) -> int:
        """Descriptor of a file in memory that holds the job as JSON; a pipe would block at
        64 KiB. `sandbox`: id of a process in the sandbox of a strict wall. `descriptors`: what
        follows the report's descriptor."""
        walled = self.wall is not None
        named: dict[str, Any] = {
            "argv": [str(part) for part in self.argv],
            "call": self.call,
            "cwd": str(self.cwd.absolute()),
            "env": dict(self.env),
        }
        fields = {
            **(self._as_seen(named) if walled else named),
            "log": str(self.log),
            "stderr_log": str(self.stderr_log) if self.stderr_log else None,
            "log_bytes": self.log_bytes,
            "timeout_s": self.timeout_s,
            "grace_s": self.grace_s,
            "open_files": limit_at_start(),
            "limits": self.limits.as_rlimits(),
            "memory_bytes": self.limits.memory_bytes,
            "file_bytes": self.limits.file_bytes,
            "folders": self._folders(),
            "descriptors": list(descriptors),
            "wall": None if self.wall is None else self._wall(self.wall, sandbox),
        }
        fd = os.memfd_create("job")
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(fields).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def sandbox_spec(self, behind: Wall) -> SandboxSpec:
        """The sandbox of a strict wall: of the machine's files, those of the system and what is
        shown. The certificates that the job's environment names stay visible."""
        certificates = (self.env[name] for name in sorted(CERTIFICATES & self.env.keys()))
        given: list[str | Path] = [*behind.show, *self.shown, *certificates]
        named = [Path(path) for path in given if path]
        secret = {Path(path).resolve() for path in behind.hide}
        shown = [path.absolute() for path in named if path.resolve() not in secret]
        binds = [Bind(path, path, read_only=True) for path in shown if path.exists()]
        binds += [Bind(path.resolve(), self._seen(path).resolve(), True) for path in self.given]
        others = [Path(path) for path in wall.not_of_the_system()]
        hidden = [
            path.resolve()
            for path in (Path.home(), *others, *map(Path, (*wall.SECRET, *behind.hide)))
            if path.exists()
        ]
        own = [Bind(path.resolve(), self._seen(path).resolve()) for path in self.visible]
        bounds = self.limits
        processes = None if wall.missing_processes() else bounds.processes
        return SandboxSpec([*binds, *own], hidden, shm_bytes=bounds.shm_bytes, processes=processes)

    def _folders(self) -> list[str]:
        """The folders that the job can write to, none inside of another."""
        named = (self.cwd, *self.visible, *(path for path, _ in self.kept))
        folders = {path.absolute() for path in named if path.is_dir()}
        return sorted(str(path) for path in folders if folders.isdisjoint(path.parents))

    def _wall(self, behind: Wall, sandbox: int | None) -> dict[str, Any]:
        own = [(path, path) for path in self.visible]
        kept = [[str(path.absolute()), str(self._seen(at))] for path, at in (*own, *self.kept)]
        files = {
            "hide": list(behind.hide),
            "keep": kept,
            "show": [*behind.show, *(str(path.absolute()) for path in self.shown)],
            "read_only": [[str(path.absolute()), str(self._seen(path))] for path in self.given],
            "shm_bytes": self.limits.shm_bytes,
            "processes": self.limits.processes,
        }
        return {"files": files, "sandbox": sandbox}

    def _seen(self, path: Path) -> Path:
        """The path at which a job behind a wall sees `path`."""
        if self.seen_at is None:
            return path.absolute()
        own, seen = (each.absolute() for each in self.seen_at)
        within = path.absolute().is_relative_to(own)
        return seen / path.absolute().relative_to(own) if within else path.absolute()

    def _as_seen(self, value: Any) -> Any:
        """The value with the path of `seen_at` in place of the folder's own, in every text."""
        if self.seen_at is None:
            return value
        if isinstance(value, str):
            own, seen = (str(each.absolute()) for each in self.seen_at)
            return value.replace(own, seen)
        if isinstance(value, Mapping):
            return {name: self._as_seen(part) for name, part in value.items()}
        return [self._as_seen(part) for part in value] if isinstance(value, list) else value


def own_folders(behind: Wall | None, home: Path, temporary: Path) -> list[tuple[Path, Path]]:
    """`kept` of a job whose home folder and temporary folder are these. A strict wall has its
    own."""
    if behind is None or behind.strict:
        return []
    return [(home, own_home()), *((temporary, Path(path)) for path in wall.TEMPORARY)]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. Example: Ended("timeout", exit_code=-9, wall_s=65.0, left_over=2, …)"""

    ended_by: str
    """`exit` (by itself), `timeout`, `cancel` or `limit`."""
    exit_code: int | None
    """The program's exit code. Negative: the number of the signal that killed it. None: it could
    not be killed."""
    wall_s: float
    left_over: int
    """Number of processes that the program left running, and which were killed."""
    output_bytes: int
    """Number of bytes that the program printed, including those that were not kept."""
    cpu_s: float
    supervisor_cpu_s: float
    """Seconds of processor time of the program's supervisor."""
    peak_memory_bytes: int
    """Peak memory of the program's largest process."""
    limit: str = ""
    """The limit that the program met, in words; empty: none that is known."""

    @property
    def failure(self) -> str | None:
        """One line on what went wrong; None if the program ended by itself with exit code 0."""
        if self.ended_by == "timeout":
            return f"ended at its deadline, after {self.wall_s:.1f} s"
        if self.exit_code == 0:
            return None
        if self.exit_code is None:
            return "could not be killed"
        if self.ended_by == "limit":
            return self.limit
        said = f"exit code {self.exit_code}" if self.exit_code > 0 else _signal(-self.exit_code)
        return f"{said}: {self.limit}" if self.limit else said


@runtime_checkable
class StartsEarly(Protocol):
    """A launcher or a reward source with a process that all trials share."""

    def start(self) -> None:
        """Starts the process, which imports what trials need. Otherwise the first trial starts
        it."""
        ...

    async def close(self) -> None:
        """Ends the process; may be called again."""
        ...


class ProcessHost:
    """Starts jobs through one server process (`job_server.py`), which it starts when needed."""

    def __init__(
        self,
        server_argv: Sequence[str] = SERVER_ARGV,
        server_args: Sequence[str] = (),
        server_env: Mapping[str, str] | None = None,
    ) -> None:
        """The server's command line is `server_argv`, the number of its socket, the file of
        `proxy/wall.py`, `server_args`. Its
        environment is `server_env`, which must hold no secret: jobs can read it in `/proc`."""
        self._server_argv = server_argv
        self._server_args = server_args
        self._server_env = inherited_environment() if server_env is None else server_env
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ports = RefusedPorts()

    def start(self) -> None:
        """Starts the server, which otherwise the first job starts."""
        self._running()

    async def run(self, job: Job, lifeline: socket.socket | None = None) -> Ended:
        """Runs the job to its end or its deadline. `lifeline`: a connection that ends the job when
        its other end closes. It is closed here once the job has it, and then remains open until
        the job and all its descendants have ended, even if this process is suspended.

        Raises:
            LaunchError: the job or its sandbox could not be started, its supervisor was killed, or
                it was ended before it filled a disk.
        """
        if job.wall is None or not job.wall.strict:
            return await self._run(job, None, lifeline)
        try:
            sandbox = await Sandbox.start(job.sandbox_spec(job.wall))
        except SandboxError as error:
            raise LaunchError(f"cannot start {job.name!r}: {error}") from error
        try:
            return await self._run(job, sandbox.pid, lifeline)
        finally:
            await sandbox.stop()

    async def _run(self, job: Job, sandbox: int | None, lifeline: socket.socket | None) -> Ended:
        more: dict[str, int] = {}
        if lifeline is not None:
            more["lifeline"] = lifeline.fileno()
        rules = job_server.NO_RULES
        if job.wall is not None and (job.wall.ports or landlock.missing_scopes() is None):
            more["ports"] = await self._ports.descriptor(job.wall.ports)
            rules = self._ports.number if sandbox is None else rules
        cancel_fd, report_fd = self._request(job, sandbox, rules, more)
        if lifeline is not None:
            lifeline.close()
        report = asyncio.ensure_future(_read(report_fd))
        try:
            raw = await asyncio.shield(report)
        except asyncio.CancelledError:
            os.close(cancel_fd)
            cancel_fd = -1
            limit_s = job.grace_s + END_TIMEOUT_S
            ending = asyncio.ensure_future(asyncio.wait([report], timeout=limit_s))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            raise
        finally:
            if cancel_fd >= 0:
                os.close(cancel_fd)
        return _parse(job, raw)

    async def close(self) -> None:
        """Ends the server. Running jobs are not ended; cancel them first."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.wait)
        self._socket = self._server = None
        self._ports.close()

    def _request(
        self, job: Job, sandbox: int | None, rules: int, more: Mapping[str, int]
    ) -> tuple[int, int]:
        """Sends the job to the server, with the number of its rule set and `more` descriptors by
        their names. Returns two descriptors: closing the first one ends the job, and the report is
        read from the second one."""
        self._running()
        cancel_read, cancel_write = os.pipe()
        report_read, report_write = os.pipe()
        job_file = job.as_file(sandbox, tuple(more))
        try:
            fds = [job_file, cancel_read, report_write, *more.values()]
            socket.send_fds(self._running(), [job_server.RULES.pack(rules)], fds)
        except OSError as error:
            os.close(cancel_write)
            os.close(report_read)
            raise LaunchError(f"cannot start {job.name!r}: {error}") from error
        finally:
            for fd in (job_file, cancel_read, report_write):
                os.close(fd)
        return cancel_write, report_read

    def _running(self) -> socket.socket:
        """The server's socket. Starts the server if none is running, also after it was killed.

        Raises:
            LaunchError: this system is not Linux, whose kernel ends a job's processes.
        """
        if sys.platform != "linux":
            raise LaunchError(f"agents and verifiers as processes need Linux, not {sys.platform}")
        if self._socket is None or self._server is None or self._server.poll() is not None:
            if self._socket is not None:
                self._socket.close()
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._server = subprocess.Popen(
                    [*self._server_argv, str(theirs.fileno()), wall.__file__, *self._server_args],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=self._server_env,
                    # The terminal's SIGINT must not reach agents: this process handles Ctrl-C.
                    start_new_session=True,
                )
        return self._socket


class RefusedPorts:
    """The rule set of the ports, and of the abstract sockets, that jobs cannot connect to. It is
    made again only if the ports change, because that takes 0.1 s."""

    def __init__(self) -> None:
        self.number = job_server.NO_RULES
        """Number of the last rule set."""
        self._ports: frozenset[int] | None = None
        self._fd = -1
        self._making = asyncio.Lock()

    async def descriptor(self, ports: frozenset[int]) -> int:
        """Valid until the next call with other ports.

        Raises:
            LaunchError: this kernel cannot refuse ports.
        """
        async with self._making:
            if ports != self._ports:
                made: list[int] = []
                try:
                    await run_to_end(lambda: made.append(landlock.refuse_ports(ports)))
                except OSError as error:
                    raise LaunchError(f"cannot refuse ports: {error}") from error
                except asyncio.CancelledError:
                    for fd in made:
                        os.close(fd)
                    raise
                self.close()
                self._ports, self._fd = ports, made[0]
                self.number += 1
            return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._ports, self._fd = None, -1


async def _read(report_fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(report_fd, "rb", buffering=0)
    )
    try:
        return await reader.read()
    finally:
        transport.close()


def _parse(job: Job, raw: bytes) -> Ended:
    if not raw:
        raise LaunchError(f"the supervisor of {job.name!r} was killed, and the job died with it")
    fields = json.loads(raw)
    if "launch_error" in fields:
        raise LaunchError(f"cannot start {job.name!r} in {job.cwd}: {fields['launch_error']}")
    ended = Ended(**fields)
    if ended.ended_by == "disk":
        raise LaunchError(f"{job.name!r} was ended, because {ended.limit}")
    return replace(ended, limit=ended.limit or _limit_of_a_process(job.limits, ended))


def _limit_of_a_process(limits: Limits, ended: Ended) -> str:
    """The limit by which the kernel ended the program, or a process of it may have failed."""
    if ended.exit_code in (0, None) or ended.ended_by != "exit":
        return ""
    if limits.cpu_s is not None and (
        ended.exit_code == -signal.SIGXCPU or ended.cpu_s > limits.cpu_s
    ):
        return f"it used {ended.cpu_s:.1f} s of processor time, and limits.cpu_s is {limits.cpu_s}"
    if limits.file_bytes is not None and ended.exit_code == -signal.SIGXFSZ:
        return f"a file grew to limits.file_bytes, {limits.file_bytes} bytes"
    if limits.memory_bytes is not None:
        return (
            f"its largest process used {ended.peak_memory_bytes >> 20} MiB, and could reserve "
            f"{limits.memory_bytes >> 20} MiB (limits.memory_bytes)"
        )
    return ""


def _signal(number: int) -> str:
    return f"killed by signal {number}"
