"""The supervisor of one job: it starts, limits and ends an agent.

It is a fork of the job server (`job_server.py`), and uses the standard library only. It reads a
JSON job from its first descriptor (a file), starts the agent, ends it when the second descriptor
closes, and writes one JSON line about the agent's end to the third. The job names those that
follow: `lifeline`, a connection that ends the agent when it closes, and that the supervisor holds
until it exits, and `ports`, the last one, the rule set of the ports that are refused to the agent.

Invariant: when a supervisor exits, no descendant of its agent is alive. The supervisor is the
*child subreaper* of all processes below it (prctl(2)): even a daemon that forks twice, opens a
session and clears its environment becomes its child, and is found and killed. The second
descriptor closes on cancellation, and when the process that started the agent dies, even by
`kill -9`; if it is closed before the agent has started, the agent does not start. If the supervisor
is killed, the agent dies with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:  # the program that loads this file cannot import the project's packages
    from agent_loop.processes.job_server import Body, Job

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 20
WALL, LANDLOCK, SECCOMP = "wall", "landlock", "seccomp"
"""The names under which the job server loads `proxy/wall.py`, and `landlock.py` and `seccomp.py` of
`proxy/machine`."""
MEMORY_CHECK_S = 0.25
SHARED_CHECK_S = 1.0
"""For what a walk through all descriptors and mounts finds."""
FILES_CHECK_S = 2.0
DISK_CHECK_S = 1.0
SCARCE_BYTES = 1 << 30
"""Bytes left on a disk, or the tenth of a smaller disk, below which an agent that has written more
than what is left is ended: the run's records and the other agents need the rest."""
REAP_TIMEOUT_S = 10.0
"""Seconds to wait until killed processes have ended; one that is blocked in the kernel, for example
by a failed disk, may never end."""


def supervise(fds: list[int], body: Body) -> None:
    job_fd, cancel_fd, report_fd, *others = fds
    with open(job_fd, "rb") as file:
        job = json.load(file)
    named = job["named"] = dict(zip(job["descriptors"], others, strict=True))
    if "ports" in named and job["wall"]["sandbox"] is None:
        os.close(named.pop("ports"))  # the server has taken it
    cancel_fds = [cancel_fd, *([named["lifeline"]] if "lifeline" in named else [])]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Blocked before the fork, so that no SIGCHLD is missed; the agent gets an empty signal mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if _closed(cancel_fds):
        _report(report_fd, launch_error="it was cancelled before it started")
        return
    try:
        agent = Agent(job, body, (*cancel_fds, report_fd))
    except OSError as error:
        _report(report_fd, launch_error=str(error))
        return
    bounds = Bounds(job["memory_bytes"], job["file_bytes"], job["folders"])
    try:
        ended_by = _watch(agent, cancel_fds, job["timeout_s"], job["grace_s"], bounds)
        wall_s = time.monotonic() - agent.started
        status, left_over = _end_everything(agent.pid)
        left_over += agent.left_behind_wall()
        agent.drain()
        agent.close_logs()
    except OSError as error:  # a full disk
        _end_everything(agent.pid)
        _report(report_fd, launch_error=f"its output cannot be kept: {error}")
        return
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    _report(
        report_fd,
        ended_by=ended_by,
        exit_code=os.waitstatus_to_exitcode(status) if status is not None else None,
        wall_s=wall_s,
        left_over=left_over,
        output_bytes=agent.log.total_bytes,
        cpu_s=usage.ru_utime + usage.ru_stime,
        supervisor_cpu_s=own.ru_utime + own.ru_stime,
        peak_memory_bytes=usage.ru_maxrss * 1024,
        limit=bounds.met,
    )


class ChildFds(NamedTuple):
    """The agent's ends of the pipes between it and its supervisor."""

    stdout: int
    stderr: int
    """Equal to `stdout` if both share a pipe."""
    error: int
    """For the reason why the agent could not be started; closed once it runs."""
    left_over: int
    """For the number of processes that an agent behind a wall left running, 4 bytes."""


class Agent:
    """The agent's main process and its output."""

    def __init__(self, job: Job, body: Body, private_fds: tuple[int, ...]) -> None:
        self.started = time.monotonic()
        self.log = BoundedLog(job["log"], job["log_bytes"])
        output_fd, output_write_fd = os.pipe()
        self.logs = {output_fd: [self.log]}
        """Descriptor of a pipe → the logs that its content is written to."""
        stderr_write_fd = output_write_fd
        if job["stderr_log"]:
            stderr_fd, stderr_write_fd = os.pipe()
            self.logs[stderr_fd] = [self.log, BoundedLog(job["stderr_log"], job["log_bytes"])]
        error_fd, error_write_fd = os.pipe()
        self._left_over_fd, left_over_write_fd = os.pipe()
        child = ChildFds(output_write_fd, stderr_write_fd, error_write_fd, left_over_write_fd)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            files = (log.fileno() for logs in self.logs.values() for log in logs)
            for fd in {*private_fds, *self.logs, *files, error_fd, self._left_over_fd}:
                os.close(fd)
            _become_agent(job, body, child, parent)
        for fd in set(child):
            os.close(fd)
        if error := os.read(error_fd, READ_BYTES):
            raise OSError(error.decode())
        os.close(error_fd)
        self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def read(self, fd: int) -> bool:
        """Copies the content of the pipe to its logs. Returns False at the end of the pipe."""
        data = os.read(fd, READ_BYTES)
        for log in self.logs[fd]:
            log.write(data)
        return bool(data)

    def drain(self) -> None:
        """Reads the rest of the pipes, when no process holds their other ends any more."""
        for fd in self.logs:
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while self.read(fd):
                    pass

    def left_behind_wall(self) -> int:
        """Number of processes that were killed with the agent's namespace; 0 without a wall."""
        os.set_blocking(self._left_over_fd, False)
        with contextlib.suppress(BlockingIOError):
            if count := os.read(self._left_over_fd, 4):
                return int(struct.unpack("i", count)[0])
        return 0

    def close_logs(self) -> None:
        for log in {log for logs in self.logs.values() for log in logs}:
            log.close()


class BoundedLog:
    """A log of at most `limit_bytes`, half for the beginning of the output and half for its end,
    with a note of how much was left out between them."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._tail = bytearray()
        self.total_bytes = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: bytes) -> None:
        room = max(self._head_bytes - self.total_bytes, 0)
        self.total_bytes += len(data)
        if room:
            self._file.write(data[:room])
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    def close(self) -> None:
        lost = len(self._tail) - self._tail_bytes
        between = self.total_bytes - self._head_bytes - self._tail_bytes
        if between > 0:
            self._file.write(b"\n[... %d bytes not kept ...]\n" % between)
            del self._tail[:lost]
        self._file.write(self._tail)
        self._file.close()


def _closed(cancel_fds: list[int]) -> bool:
    poll = select.poll()
    for fd in cancel_fds:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


class Bounds:
    """What all processes of an agent may use together. It is added up now and then, because only
    control groups, which most users may not make, bound it at each moment. Without a limit of its
    files, an agent is ended before it fills a disk."""

    def __init__(
        self, memory_bytes: int | None, file_bytes: int | None, folders: list[str]
    ) -> None:
        self.met = ""
        """The bound that was passed, in words; empty: none."""
        self.met_by = "limit"
        """What set it: `limit`, or `disk` if it is the disk's."""
        self._memory_bytes, self._file_bytes = memory_bytes, file_bytes
        self._disks: dict[int, list[str]] = {}
        """Number of a device → its folders there."""
        for folder in folders:
            with contextlib.suppress(OSError):
                self._disks.setdefault(os.stat(folder).st_dev, []).append(folder)
        self._pause_s = MEMORY_CHECK_S if memory_bytes else DISK_CHECK_S
        self._next_files = self._next_disk = self._next_shared = time.monotonic()
        self._shared_bytes = 0
        self._next = self._next_files + self._pause_s

    @property
    def due_s(self) -> float:
        return self._next - time.monotonic()

    def check(self) -> None:
        """Sets `met` if a bound is passed."""
        if self._memory_bytes:
            self._check_memory(self._memory_bytes)
        if self._file_bytes and time.monotonic() >= self._next_files:
            self._check_files(self._file_bytes)
        if not self.met and time.monotonic() >= self._next_disk:
            self._check_disks()
        self._next = time.monotonic() + self._pause_s

    def _check_memory(self, most: int) -> None:
        """What was written to files in memory counts from the last walk, which is followed by a
        pause of at least 20 times its length."""
        pids = _descendants(os.getpid())
        if (start := time.monotonic()) >= self._next_shared:
            self._shared_bytes = files_in_memory(pids)
            walked_s = time.monotonic() - start
            self._next_shared = start + walked_s + max(SHARED_CHECK_S, 20 * walked_s)
        own = sum(map(_own_bytes, pids)) + self._shared_bytes
        if own > most and (used := sum(map(_shared_out_bytes, pids)) + self._shared_bytes) > most:
            self.met = (
                f"its processes used {used >> 20} MiB of memory together, and at most "
                f"{most >> 20} MiB are allowed (limits.memory_bytes)"
            )

    def _check_files(self, most: int) -> None:
        """Each walk is followed by a pause of at least 20 times its length."""
        start = time.monotonic()
        used = sum(map(self._used_on, self._disks))
        if used > most:
            self.met = (
                f"its files have {used >> 20} MiB together, and at most {most >> 20} MiB are "
                "allowed (limits.file_bytes)"
            )
        walked_s = time.monotonic() - start
        self._next_files = start + walked_s + max(FILES_CHECK_S, 20 * walked_s)

    def _check_disks(self) -> None:
        """Its files are added up only while a disk is scarce; pauses as in `_check_files`."""
        start = time.monotonic()
        for disk, folders in self._disks.items():
            left = _scarce_bytes(folders[0])
            if left is not None and (used := self._used_on(disk)) > left:
                self.met_by = "disk"
                self.met = (
                    f"its disk had {left >> 20} MiB left, and its own files {used >> 20} MiB: "
                    f"free space on the disk of {folders[0]}, or set process.limits.file_bytes"
                )
        walked_s = time.monotonic() - start
        self._next_disk = start + walked_s + max(DISK_CHECK_S, 20 * walked_s)

    def _used_on(self, disk: int) -> int:
        """Bytes of its files there, and of those that its processes have deleted and hold open."""
        files = sum(map(disk_bytes, self._disks[disk]))
        return files + deleted_bytes(disk, _descendants(os.getpid()))


def _own_bytes(pid: int) -> int:
    """Memory of a process that is not of a file, some of which it may share with its parent."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * resource.getpagesize()
    return 0


def _shared_out_bytes(pid: int) -> int:
    """As `_own_bytes`, with what several processes share divided among them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return _own_bytes(pid)


def files_in_memory(pids: list[int]) -> int:
    """Bytes of the files that these processes keep in memory: those that they made without a name
    (memfd_create), and all of the file systems in memory that they see."""
    found: dict[tuple[int, int], int] = {}
    namespaces: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for each in descriptors:
                with contextlib.suppress(OSError):
                    if os.readlink(each.path).startswith("/memfd:"):
                        file = os.stat(each.path)
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
        with contextlib.suppress(OSError):
            namespaces.setdefault(os.readlink(f"/proc/{pid}/ns/mnt"), pid)
    namespaces.pop(os.readlink("/proc/self/ns/mnt"), None)  # without a wall: the machine's own
    for pid in namespaces.values():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mountinfo", "rb") as mounts:
            for line in mounts:
                with contextlib.suppress(OSError):
                    _add_file_system(pid, line, found)
    return sum(found.values())


def _add_file_system(pid: int, line: bytes, found: dict[tuple[int, int], int]) -> None:
    """Adds what is used of a file system in memory, a line of `mountinfo`."""
    mount, _, of_system = line.partition(b" - ")
    if not of_system.startswith(b"tmpfs "):
        return
    _, _, device, _, place, *_ = mount.split(b" ")
    at = f"/proc/{pid}/root".encode() + place.decode("unicode_escape").encode("latin-1")
    number = os.stat(at).st_dev
    if f"{os.major(number)}:{os.minor(number)}".encode() != device:
        return  # another one is mounted over it
    system = os.statvfs(at)
    found[number, 0] = (system.f_blocks - system.f_bfree) * system.f_frsize


def _scarce_bytes(folder: str) -> int | None:
    """Bytes that are left on the disk of a folder; None: they are not scarce."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        left = disk.f_bavail * disk.f_frsize
        if left < min(SCARCE_BYTES, disk.f_blocks * disk.f_frsize // 10):
            return left
    return None


def disk_bytes(folder: str) -> int:
    """Bytes on the disk of all files below a folder; a link counts itself and not what it leads
    to."""
    total, pending = 0, [folder]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total


def deleted_bytes(disk: int, pids: list[int]) -> int:
    """Bytes on a disk of files without a name that these processes hold open."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for each in descriptors:
                with contextlib.suppress(OSError):
                    file = os.stat(each.path)
                    if file.st_dev == disk and file.st_nlink == 0:
                        found[file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def _watch(
    agent: Agent, cancel_fds: list[int], timeout_s: float, grace_s: float, bounds: Bounds
) -> str:
    """Waits until the agent's main process ends, and returns why: `exit`, `timeout`, `cancel`,
    `limit` or `disk`. At the deadline its process group gets SIGTERM, and after `grace_s` all
    descendants get SIGKILL; past a bound at once.
    """
    poll = select.poll()
    for fd in (agent.pidfd, *agent.logs, *cancel_fds):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    ended_by = "exit"
    deadline = agent.started + timeout_s
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            if ended_by != "exit":
                return ended_by
            ended_by, deadline = "timeout", time.monotonic() + grace_s
            agent.signal(signal.SIGTERM)
            continue
        if bounds.due_s <= 0:
            bounds.check()
            if bounds.met:
                return bounds.met_by
        pause_s = max(0.0, min(remaining_s, bounds.due_s))
        ready = {fd for fd, _ in poll.poll(pause_s * 1000 + 1)}
        for fd in ready & agent.logs.keys():
            if not agent.read(fd):
                poll.unregister(fd)
        if agent.pidfd in ready:
            return ended_by
        if ready.intersection(cancel_fds):
            for fd in cancel_fds:
                poll.unregister(fd)
            cancel_fds = []
            ended_by, deadline = "cancel", time.monotonic() + grace_s
            agent.signal(signal.SIGTERM)


def _end_everything(agent_pid: int) -> tuple[int | None, int]:
    """Kills and reaps processes until there is no child left.

    Returns the agent's wait status (None if it did not end within REAP_TIMEOUT_S), and the number
    of other processes that were still alive.
    """
    status: int | None = None
    killed: set[int] = set()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == agent_pid:
                    status = reaped[1]
        except ChildProcessError:
            break
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    return status, len(killed - {agent_pid})


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="utf-8") as file:
                    children = [int(child) for child in file.read().split()]
                found += children
                pending += children
    return found


def _become_agent(job: Job, body: Body, fds: ChildFds, parent: int) -> None:
    """Sets up the forked child and runs `body` in it; never returns nor raises: what follows is its
    parent's."""

    def become() -> NoReturn:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        null_fd = os.open(os.devnull, os.O_RDONLY)
        for fd, at in ((null_fd, 0), (fds.stdout, 1), (fds.stderr, 2)):
            os.dup2(fd, at)
        for fd in {null_fd, fds.stdout, fds.stderr, fds.left_over}:
            os.close(fd)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (job["open_files"], most))
        for name, value in job["limits"].items():
            last = value + 1 if name == "RLIMIT_CPU" else value  # SIGXCPU first, which says why
            resource.setrlimit(getattr(resource, name), (value, last))
        os.chdir(job["cwd"])
        body(job, fds.error)
        os._exit(127)  # a body does not return

    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        _end_first_without_memory()
        if job["wall"] is None:
            become()
        _behind_wall(job, become, fds.left_over)
    except BaseException as error:  # noqa: BLE001 (it is the reason why there is no agent)
        own = isinstance(error, OSError | ValueError)
        words = str(error) if own else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # it is closed once the agent runs
            os.write(fds.error, words.encode(errors="replace"))
    finally:
        os._exit(127)


def _end_first_without_memory() -> None:
    """If the machine's memory ends, the kernel ends agents, not engines, the proxy or the
    trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as f:
        f.write("1000")


def _behind_wall(job: Job, become: Callable[[], NoReturn], left_over_fd: int) -> None:
    """Calls `become` behind the job's wall."""
    module: Any = sys.modules[WALL]
    wall = job["wall"]

    def prepare() -> None:
        if rules_fd := job["named"].get("ports"):
            sys.modules[LANDLOCK].take_rules(rules_fd)
            os.close(rules_fd)
        if sys.modules[SECCOMP].missing() is None:  # or the run has accepted that it is
            sys.modules[SECCOMP].refuse_calls()

    if wall["sandbox"] is not None:
        module.join(wall["sandbox"], prepare, become, left_over_fd=left_over_fd)
    files = module.Files(**wall["files"])
    module.enter(files, become, prepare=prepare, left_over_fd=left_over_fd)


def execute(job: Job, error_fd: int) -> None:
    """The body of an agent that is a program. `error_fd` is closed by exec."""
    # Python ignores these signals. A program would inherit this, and `yes | head` would not end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(job["argv"][0], job["argv"], job["env"])


def _prctl(option: int, value: int) -> None:
    prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _report(report_fd: int, **fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the process that asked for the job has ended
        os.write(report_fd, json.dumps(fields).encode() + b"\n")
