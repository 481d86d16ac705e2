"""The walls around an agent, which hide processes, files and TCP ports from the agent.

Uses only the standard library, so that a program that starts agents can load this file alone. An
agent behind the light wall (`enter`) has a PID namespace with its own `/proc`, so it sees only its
own processes; the hidden paths are empty for it; `/dev/shm` and System V IPC are its own; `/sys`
is read-only; and it cannot connect to the refused TCP ports. Home, network, sockets and devices are
unchanged. The light wall prevents reading and cheating; it is not a jail for hostile code, which
can change what the user can change. The strict wall (`join`) is Harbor's local sandbox, whose
files are a private copy of the machine's.

    supervisor ─fork─▶ gate ─fork─▶ init (process 1 of the namespace) ─fork─▶ agent

The gate unshares the namespaces and lives until the agent ends. It then ends with the agent's exit
code or signal, so that the supervisor handles both alike. A strict wall's namespaces and init
process are the sandbox's, and the agent is the gate's child. Invariant: when the gate (and the
sandbox) has ended, the kernel has ended every process behind the wall; the agent cannot undo a
mount (root loses CAP_SYS_ADMIN, and in a user namespace of its own inherited mounts are locked).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24

KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31})
"""Capabilities that root keeps: Docker's default set without MKNOD, which gives access to the
machine's disks (chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
net_bind_service, net_raw, sys_chroot, audit_write, setfcap)."""
GPU_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's driver, of the kernel's graphics, of AMD's, and of Windows' below WSL."""
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs")
"""Root could change the machine through these (`core_pattern` names a program to run)."""

MOUNT_SETATTR = 442
"""Number of a system call, the same on every architecture."""
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 0x1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Wall:
    """What is hidden from agents. Example: Wall(hide=("/runs/a",), ports=frozenset({29500}))"""

    hide: tuple[str, ...]
    """Files and folders that are empty behind the wall; those that do not exist are ignored."""
    ports: frozenset[int] = frozenset()
    """TCP ports that cannot be connected to."""
    show: tuple[str, ...] | None = None
    """A strict wall: the files and folders that stay visible, read-only, also below hidden ones.
    None: a light wall."""


def gpu_devices() -> tuple[str, ...]:
    """The files and folders by which programs of this machine reach GPUs."""
    return tuple(sorted(path for pattern in GPU_DEVICES for path in glob.glob(pattern)))


def missing() -> str | None:
    """Why this machine cannot put agents behind a light wall; None if it can.

    Tries it in a separate process, because containers and sysctls refuse namespaces in many ways.
    """
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    attempt = subprocess.run(
        [sys.executable, "-I", "-S", __file__],
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    if attempt.returncode == 0:
        return None
    return attempt.stderr.strip() or f"the attempt ended with code {attempt.returncode}"


def enter(
    hide: Sequence[str],
    keep: Sequence[Sequence[str]],
    body: Callable[[], NoReturn],
    *,
    left_over_fd: int = -1,
) -> NoReturn:
    """Turns this process into the gate, and runs `body` in the agent's process, in the folder `/`.
    Never returns.

    Args:
        hide: files and folders that are empty behind the wall; those that do not exist are ignored.
        keep: files and folders that are visible and writable, each with the path at which it is:
            its own, or another one inside a hidden folder.
        left_over_fd: gets the number of processes that the agent left running, 4 bytes.

    Raises:
        OSError: the kernel refuses; raised in the gate or in the init process.
    """
    as_root = os.geteuid() == 0
    if as_root:
        _unshare(CLONE_NEWPID | CLONE_NEWIPC)
    else:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC)
        _map_own_ids(uid, gid)
    status_read, status_write = os.pipe()
    gate = os.getpid()
    init = os.fork()
    if init == 0:
        os.close(status_read)
        _die_with(gate)
        _init(hide, keep, body, as_root, status_write)
    # The signal is for the agent's group; `_init` passes it on.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _close_all_but(status_read, left_over_fd)
    with os.fdopen(status_read, "rb") as file:
        report = file.read(8)
    os.waitpid(init, 0)
    if len(report) < 8:
        os._exit(127)  # the wall could not be built; the init process has reported why
    status, left_over = struct.unpack("ii", report)
    if left_over_fd >= 0:
        os.write(left_over_fd, struct.pack("i", left_over))
    _end_as(status)


def join(
    sandbox: int,
    prepare: Callable[[], None],
    body: Callable[[], NoReturn],
    *,
    left_over_fd: int = -1,
) -> NoReturn:
    """Turns this process, which must be root's, into the gate of a strict wall, and runs `body` in
    the agent's process, in the folder `/` of the sandbox. Never returns.

    Args:
        sandbox: id of a process in the sandbox's namespaces.
        prepare: called in the agent's process before its capabilities are dropped.
        left_over_fd: as for `enter`.

    Raises:
        OSError: the sandbox has ended, or the kernel refuses.
    """
    names = ("root", "ns/ipc", "ns/uts", "ns/pid_for_children", "ns/mnt")
    root_fd, *namespaces = [os.open(f"/proc/{sandbox}/{name}", os.O_RDONLY) for name in names]
    for fd in namespaces:
        _check(_libc.setns(fd, 0))
    os.fchdir(root_fd)
    os.chroot(".")
    for fd in (root_fd, *namespaces):
        os.close(fd)
    gate = os.getpid()
    agent = os.fork()
    if agent == 0:
        _die_with(gate)
        os.setpgid(0, 0)
        prepare()
        _restrict(True)
        body()
    _forward_terminations(agent)
    _close_all_but(left_over_fd)
    status = os.waitpid(agent, 0)[1]
    if left_over_fd >= 0:
        os.write(left_over_fd, struct.pack("i", _left_over()))
    _end_as(status)


def _init(
    hide: Sequence[str],
    keep: Sequence[Sequence[str]],
    body: Callable[[], NoReturn],
    as_root: bool,
    status_fd: int,
) -> NoReturn:
    """Process 1 of the namespace: builds the wall, starts the agent, reaps orphaned processes."""
    _prctl(PR_SET_DUMPABLE, 0)  # `/proc/1/environ` would show this server's environment
    _unshare(CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _cover(hide, keep)
    _own_proc(as_root)
    _mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    _make_sys_read_only()
    os.chdir("/")  # the working folder may be covered now
    if as_root:
        _cover_disks()
    agent = os.fork()
    if agent == 0:
        os.close(status_fd)
        os.setpgid(0, 0)
        _restrict(as_root)
        body()
    _forward_terminations(agent)
    _close_all_but(status_fd)
    while True:
        pid, status = os.wait()
        if pid == agent:
            os.write(status_fd, struct.pack("ii", status, _left_over()))
            os._exit(0)


def stand_at(folder: str, path: str) -> None:
    """Makes a folder visible at another path beside its own, for this process and its children.
    Their parent's other entries are hidden. Raises OSError if the kernel refuses."""
    if os.geteuid() == 0:
        _unshare(CLONE_NEWNS)
    else:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _map_own_ids(uid, gid)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _cover([os.path.dirname(path)], [(folder, folder), (folder, path)])


def _cover(hide: Sequence[str], keep: Sequence[Sequence[str]]) -> None:
    """Hides paths, outer ones first, then makes `keep` visible again by descriptors that were
    opened before."""
    opened = [(os.path.realpath(path), os.open(kept, os.O_PATH)) for kept, path in keep]
    kept_paths = [os.path.realpath(kept) for kept, _ in keep]
    covered = sorted({os.path.realpath(path) for path in hide}, key=len)
    for path in covered:
        if any(_is_within(path, kept) for kept in kept_paths):
            continue  # inside a kept folder
        if os.path.isdir(path):
            _mount("wall", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        elif os.path.exists(path):
            _mount(os.devnull, path, None, MS_BIND)
    for path, fd in opened:
        if any(_is_within(path, folder) for folder in covered):
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            _mount(f"/proc/self/fd/{fd}", path, None, MS_BIND | MS_REC)
        os.close(fd)
    for path in covered:
        if os.path.ismount(path) and os.path.isdir(path):
            _remount_read_only(path)


def _own_proc(as_root: bool) -> None:
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if as_root:
        for name in READ_ONLY_PROC:
            path = f"/proc/{name}"
            if os.path.exists(path):
                _mount(path, path, None, MS_BIND)
                _remount_read_only(path)


def _make_sys_read_only() -> None:
    """With the file systems mounted below it: their files freeze and kill whole groups of
    processes, and name programs that the kernel runs."""
    if os.path.ismount("/sys"):
        attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
        size = ctypes.c_size_t(len(attributes))
        _syscall(MOUNT_SETATTR, AT_FDCWD, b"/sys", AT_RECURSIVE, attributes, size)


def _cover_disks() -> None:
    """Covers block devices, because root could read every file from the disk itself."""
    with os.scandir("/dev") as entries:
        disks = [e.path for e in entries if _is_block_device(e)]
    for path in disks:
        _mount(os.devnull, path, None, MS_BIND)


def _is_block_device(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_mode & 0o170000 == 0o060000


def _restrict(as_root: bool) -> None:
    """Restricts the agent's own process, as the last step."""
    for capability in range(64):
        if not as_root or capability not in KEPT_CAPABILITIES:
            with contextlib.suppress(OSError):  # the kernel does not know this capability
                _prctl(PR_CAPBSET_DROP, capability)
    kept = sum(1 << number for number in KEPT_CAPABILITIES) if as_root else 0
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    _check(_libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0)))


def _forward_terminations(agent: int) -> None:
    def forward(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent, number)

    signal.signal(signal.SIGTERM, forward)


def _end_as(status: int) -> NoReturn:
    """Ends this process as the agent ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _left_over() -> int:
    """Number of living processes of this namespace besides its first one."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return sum(name.isdigit() for name in os.listdir("/proc")) - 1


def _close_all_but(*kept: int) -> None:
    start = 3
    for fd in sorted(fd for fd in kept if fd >= start):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _map_own_ids(uid: int, gid: int) -> None:
    """Maps the user's own ids, so that the agent keeps them."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when the gate ends, also after `kill -9`."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (0, parent):  # 0: the gate is outside of the namespace
        os._exit(1)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    if _libc.mount(*encoded, ctypes.c_ulong(flags), data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount on {target}: {os.strerror(number)}")


def _remount_read_only(path: str) -> None:
    # A remount must keep the flags that are locked in a user namespace.
    options = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount(None, path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | options)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        why = "the kernel refuses a new namespace"
        raise OSError(number, f"{why}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0))


def _syscall(number: int, *args: Any) -> int:
    return _check(_libc.syscall(number, *args))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number or errno.EINVAL, os.strerror(number))
    return result


def _try() -> None:
    """`python -I -S wall.py`: builds a wall around nothing, and writes why if that fails."""

    def body() -> NoReturn:
        os._exit(0)

    try:
        enter((), (), body)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    _try()
