"""The walls around an agent, which hide processes, files and TCP ports from the agent.

Uses only the standard library, so that a program that starts agents can load this file alone. An
agent behind the light wall (`enter`) has a PID namespace with its own `/proc`, so it sees only its
own processes; `/dev/shm` and System V IPC are its own; `/sys` is read-only; and it cannot connect
to the refused TCP ports. Of the machine's files it sees what `Files` names: the system and its own
tools, read-only, and the folders that are its own. The strict wall (`join`) is Harbor's local
sandbox, whose files are a private copy of the machine's. A program that a person starts in a folder
of their own (`agentic-proxy run`) has a light wall without `Files`: it sees and changes everything
but the hidden paths.

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
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

PARTS = {
    "ports": "agents can connect to the ports of this run's processes (Ray, torch, engines)",
    "processes": "a fork bomb meets no bound",
    "sockets": "agents can connect to abstract sockets of other processes",
}
"""What a kernel may not be able to hold, by the names under which a run accepts that it is not, and
what this means."""

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

OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
"""Numbers of system calls, the same on every architecture."""
AT_FDCWD, AT_RECURSIVE, AT_EMPTY_PATH = -100, 0x8000, 0x1000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
MNT_DETACH = 2

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys"),
    *("/nix", "/gnu", "/snap", "/run/current-system", "/run/opengl-driver", "/var/lib/dpkg"),
    *("/var/lib/rpm", "/var/lib/ca-certificates", "/var/cache/fontconfig"),
)
"""What belongs to the system. Not `/var`, `/run`, `/srv`, `/mnt`, `/home`: logs, sockets, data."""
SECRET = (
    *("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers"),
    *("/etc/sudoers.d", "/etc/ssh", "/etc/ssl/private", "/etc/kubernetes", "/etc/krb5.keytab"),
)
"""What of the system only root may read; agents may be root's."""
SETTINGS = "/etc"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TEMPORARY = ("/tmp", "/var/tmp")
BOUND_NAMESPACES = (6, 14)
"""The first Linux in which each PID namespace has a `pid_max` of its own."""
RESERVED_PIDS = 300
"""Ids that the kernel does not use again once all others were used."""
SHM_BYTES = 256 << 20
"""Default size of `/dev/shm`. Docker's is 64 MB, which is too small for browsers."""
PAGE_BYTES = resource.getpagesize()
MESSAGE_QUEUES = 64
"""System V message queues, each of which holds up to 16 KiB in the kernel."""
MAX_LINKS = 40
"""Symbolic links on the way to one file, as in the kernel."""

KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31})
"""Capabilities that root keeps: Docker's default set without MKNOD, which gives access to the
machine's disks, and NET_RAW, which reads the requests of all processes with their keys, because the
network is the machine's (chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
net_bind_service, sys_chroot, audit_write, setfcap)."""
GPU_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's driver, of the kernel's graphics, of AMD's, and of Windows' below WSL."""
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs")
"""Root could change the machine through these (`core_pattern` names a program to run)."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Wall:
    """What agents see. Example: Wall(hide=("/runs/a",), ports=frozenset({29500}))"""

    hide: tuple[str, ...]
    """Files and folders that are empty behind the wall, also inside of those that it shows; those
    that do not exist are ignored."""
    ports: frozenset[int] = frozenset()
    """TCP ports that cannot be connected to."""
    show: tuple[str, ...] = ()
    """Files and folders that can be read, in addition to the system's and the agent's own tools;
    what is inside of a hidden folder, too."""
    strict: bool = False
    """Whether the files are a private copy of the machine's, which the agent can change."""
    accepted: frozenset[str] = frozenset()
    """The PARTS that the machine need not hold."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a light wall.

    Example: Files(hide=["/opt/project"], keep=[("/runs/a/t-1/home", "/home/me")], show=["/opt/x"])
    """

    hide: Sequence[str]
    """Empty, where they would be visible."""
    keep: Sequence[Sequence[str]]
    """Visible and writable: each with the path at which it is visible."""
    show: Sequence[str]
    """Visible and read-only, besides the system."""
    read_only: Sequence[Sequence[str]] = ()
    """As `keep`, and read-only."""
    shm_bytes: int = SHM_BYTES
    """Size of `/dev/shm`, and for root's agents of System V shared memory."""
    processes: int | None = None
    """Number of processes and threads at the same time; None: no bound."""


def gpu_devices() -> tuple[str, ...]:
    """The files and folders by which programs of this machine reach GPUs."""
    return tuple(sorted(path for pattern in GPU_DEVICES for path in glob.glob(pattern)))


def not_of_the_system() -> list[str]:
    """Folders that hold data, logs and other people's files: what is neither in SYSTEM nor made by
    a sandbox."""
    made = {"proc", "dev", "tmp", "run", "var"}
    parts = {path.split("/")[1] for path in SYSTEM}
    folders = [f"/{name}" for name in os.listdir("/") if name not in made | parts]
    return [*folders, "/var/log", "/var/spool", "/var/mail", "/var/backups", "/var/tmp"]


@lru_cache(maxsize=1)
def unreadable() -> tuple[str, ...]:
    """What of `/etc` only its owner or its group may read, the outermost: root's agents could. Read
    once."""
    found, pending = [], [SETTINGS]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISREG(mode) and not mode & stat.S_IROTH:
                    found.append(entry.path)
                elif stat.S_ISDIR(mode):
                    is_open = mode & stat.S_IROTH and mode & stat.S_IXOTH
                    (pending if is_open else found).append(entry.path)
    return tuple(sorted(found))


def lacking(accepted: Collection[str] = ()) -> dict[str, str]:
    """The PARTS that this machine does not hold, besides those accepted, with the reasons."""
    from proxy.machine import landlock, seccomp  # not where this file is loaded alone

    found = {
        "ports": landlock.missing() or seccomp.missing(),
        "processes": missing_processes(),
        "sockets": landlock.missing_scopes() or seccomp.missing(),
    }
    return {name: why for name, why in found.items() if why is not None and name not in accepted}


def missing_processes() -> str | None:
    """Why this process cannot bound the number of an agent's processes; None if it can."""
    if os.geteuid() != 0 or _bounds_namespaces():
        return None
    needed = ".".join(map(str, BOUND_NAMESPACES))
    return f"bounding root's processes needs Linux {needed}, and this is {os.uname().release}"


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


def nothing() -> None:
    """What `enter` prepares by default."""


def enter(
    files: Files | Sequence[str],
    body: Callable[[], NoReturn],
    *,
    prepare: Callable[[], None] = nothing,
    left_over_fd: int = -1,
) -> NoReturn:
    """Turns this process into the gate, and runs `body` in the agent's process, in the folder `/`.
    Never returns.

    Args:
        files: what is visible; or files and folders that are empty, where all others are unchanged.
            Those that do not exist are ignored.
        prepare: called in the agent's process before its capabilities are dropped.
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
        _init(files, body, prepare, as_root, status_write)
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
        prepare: as for `enter`.
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
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    agent = os.fork()
    if agent == 0:
        _die_with(gate)
        os.setpgid(0, 0)
        _prctl(PR_SET_DUMPABLE, 0)  # what a function was given is not for the programs it starts
        prepare()
        _restrict(True)
        _let_end()
        body()
    _forward_terminations(agent)
    _close_all_but(left_over_fd)
    status = os.waitpid(agent, 0)[1]
    if left_over_fd >= 0:
        os.write(left_over_fd, struct.pack("i", _left_over()))
    _end_as(status)


def _init(
    files: Files | Sequence[str],
    body: Callable[[], NoReturn],
    prepare: Callable[[], None],
    as_root: bool,
    status_fd: int,
) -> NoReturn:
    """Process 1 of the namespace: builds the wall, starts the agent, reaps orphaned processes."""
    _prctl(PR_SET_DUMPABLE, 0)  # `/proc/1/environ` would show this server's environment
    _unshare(CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    if isinstance(files, Files):
        _own_root(files, as_root)
    else:
        _cover(files)
        _own_proc(as_root)
        _mount("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        _make_sys_read_only()
        if as_root:
            _cover_disks()
    os.chdir("/")  # the working folder may be covered now
    if isinstance(files, Files) and files.processes and not _bounds_namespaces():
        _bound_user(files.processes)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    agent = os.fork()
    if agent == 0:
        os.close(status_fd)
        os.setpgid(0, 0)
        prepare()
        _restrict(as_root)
        _let_end()
        body()
    _forward_terminations(agent)
    _close_all_but(status_fd)
    while True:
        pid, status = os.wait()
        if pid == agent:
            os.write(status_fd, struct.pack("ii", status, _left_over()))
            os._exit(0)


def _own_root(files: Files, as_root: bool) -> None:
    """Replaces the root by one that holds nothing but what the agent sees: mounts of the machine's
    folders, without their set-user-ID programs, in a file system in memory."""
    plan = _plan(files)
    # Before anything is mounted: what is mounted later could cover a source.
    trees = [(each, -1 if each.source is None else _tree(each)) for each in plan]
    own = (place for _, place in (*files.keep, *files.read_only))
    links = [link for each in (*SYSTEM, *files.show, *own) for link in _links(each)]
    home = "/proc"  # any folder that exists; the new root stands here until it is the root
    _mount("wall", home, "tmpfs", MS_NOSUID, "mode=0755,size=4m")
    for each, tree in trees:
        at = home + each.target
        _make_place(at, is_folder=each.is_folder)
        if tree >= 0:
            _syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(at), MOVE_MOUNT_F_EMPTY_PATH)
            os.close(tree)
        elif each.is_folder:
            _mount("wall", at, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        else:
            _mount_device(os.devnull, at)
    for path, text in links:
        with contextlib.suppress(FileExistsError):
            os.makedirs(home + os.path.dirname(path), exist_ok=True)
            os.symlink(text, home + path)
    for each, tree in trees:
        if tree < 0 and each.is_folder:
            _set_attributes(home + each.target, MOUNT_ATTR_RDONLY, 0)
    _own_dev(home + "/dev", files.shm_bytes)
    os.makedirs(home + "/proc", exist_ok=True)
    _own_proc(as_root, home + "/proc", files)
    for name in ("run", "tmp"):
        os.makedirs(f"{home}/{name}", exist_ok=True)
    _set_attributes(home, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, 0)
    os.chdir(home)
    _check(_libc.pivot_root(b".", b"."))
    _check(_libc.umount2(b".", MNT_DETACH))


@dataclass(frozen=True, slots=True)
class _Place:
    """A mount of the new root."""

    target: str
    source: str | None
    """None: empty."""
    writable: bool
    is_folder: bool


def _plan(files: Files) -> list[_Place]:
    """The mounts of the new root, outer ones first. What is visible already, because it is inside
    of a folder that is shown, is left out, and so is what is hidden and not visible."""
    wanted: dict[str, _Place] = {}
    resolver = os.path.realpath("/etc/resolv.conf")
    for path in (*SYSTEM, resolver, *files.show):
        real = os.path.realpath(path)
        if os.path.exists(real):
            wanted[real] = _Place(real, real, False, os.path.isdir(real))
    for path in (*SECRET, *files.hide):
        real = os.path.realpath(path)
        if os.path.exists(real) and not any(_is_within(each, real) for each in SYSTEM):
            wanted[real] = _Place(real, None, False, os.path.isdir(real))
    for pairs, writable in ((files.read_only, False), (files.keep, True)):
        for source, target in pairs:
            real = os.path.realpath(target)
            wanted[real] = _Place(real, source, writable, os.path.isdir(source))
    planned: dict[str, _Place] = {}
    for target in sorted(wanted, key=len):
        each, around = wanted[target], _around(target, planned)
        shown = around is not None and around.source is not None
        if each.source is None and not (shown and not around.writable):  # type: ignore[union-attr]
            continue
        if each.source == target and not each.writable and shown and around.source == around.target:  # type: ignore[union-attr]
            continue
        planned[target] = each
    return list(planned.values())


def _around(path: str, planned: dict[str, _Place]) -> _Place | None:
    """The innermost planned place that contains the path."""
    while path != "/":
        path = os.path.dirname(path)
        if path in planned:
            return planned[path]
    return None


def _tree(place: _Place) -> int:
    """A descriptor of a mount of the place's source that is not attached yet."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    tree = _syscall(OPEN_TREE, AT_FDCWD, os.fsencode(place.source or ""), flags)
    attributes = MOUNT_ATTR_NOSUID | (0 if place.writable else MOUNT_ATTR_RDONLY)
    if not place.target.startswith("/dev/"):
        attributes |= MOUNT_ATTR_NODEV
    _set_attributes("", attributes, AT_EMPTY_PATH | AT_RECURSIVE, tree)
    return tree


def _make_place(at: str, *, is_folder: bool) -> None:
    """Makes a folder or an empty file to mount on, unless there is one."""
    if os.path.lexists(at):
        return
    os.makedirs(at if is_folder else os.path.dirname(at), exist_ok=True)
    if not is_folder:
        os.close(os.open(at, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _links(path: str) -> Iterator[tuple[str, str]]:
    """The symbolic links on the way to a file: their own paths, and what is written in them."""
    done, parts, count = "", path.split("/"), 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            done = os.path.dirname(done)
            continue
        step = f"{done}/{part}"
        if os.path.islink(step) and (count := count + 1) <= MAX_LINKS:
            text = os.readlink(step)
            yield step, text
            parts = text.split("/") + parts
            done = "" if text.startswith("/") else done
        else:
            done = step


def _own_dev(at: str, shm_bytes: int) -> None:
    """`/dev` without the machine's devices; GPUs are among what is shown."""
    os.makedirs(at, exist_ok=True)
    for name in DEVICES:
        _make_place(f"{at}/{name}", is_folder=False)
        _mount_device(f"/dev/{name}", f"{at}/{name}")
    for name in ("pts", "shm"):
        os.makedirs(f"{at}/{name}", exist_ok=True)
    terminals = "newinstance,ptmxmode=0666,mode=0620"
    _mount("devpts", f"{at}/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    size = f"mode=1777,size={shm_bytes}"
    _mount("shm", f"{at}/shm", "tmpfs", MS_NOSUID | MS_NODEV, size)
    standard = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
    for name, descriptor in {**standard}.items():
        os.symlink(f"/proc/self/fd{descriptor}", f"{at}/{name}")
    os.symlink("pts/ptmx", f"{at}/ptmx")


def _cover(hide: Sequence[str]) -> None:
    """Hides paths, outer ones first."""
    covered = sorted({os.path.realpath(path) for path in hide}, key=len)
    for path in covered:
        if os.path.isdir(path):
            _mount("wall", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
            _remount_read_only(path)
        elif os.path.exists(path):
            _mount_device(os.devnull, path)


def _own_proc(as_root: bool, at: str = "/proc", files: Files | None = None) -> None:
    _mount("proc", at, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    bounds: dict[str, int] = {}
    if files is not None and files.processes and _bounds_namespaces():
        bounds["pid_max"] = files.processes + RESERVED_PIDS
    if files is not None and as_root:  # the settings of an IPC namespace are root's
        bounds |= {"shmall": files.shm_bytes // PAGE_BYTES, "msgmni": MESSAGE_QUEUES}
    for name, value in bounds.items():
        with open(f"{at}/sys/kernel/{name}", "w", encoding="ascii") as file:
            file.write(str(value))
    if as_root:
        for name in READ_ONLY_PROC:
            path = f"{at}/{name}"
            if os.path.exists(path):
                _mount(path, path, None, MS_BIND)
                _remount_read_only(path)


def _bounds_namespaces() -> bool:
    """Whether `pid_max` is that of the PID namespace; before, it is that of the machine."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= BOUND_NAMESPACES


def _bound_user(processes: int) -> None:
    """Bounds the processes of the user in this user namespace; has no effect for root."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard != resource.RLIM_INFINITY:
        processes = min(processes, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _make_sys_read_only() -> None:
    """With the file systems mounted below it: their files freeze and kill whole groups of
    processes, and name programs that the kernel runs."""
    if os.path.ismount("/sys"):
        _set_attributes("/sys", MOUNT_ATTR_RDONLY, AT_RECURSIVE)


def _cover_disks() -> None:
    """Covers block devices, because root could read every file from the disk itself."""
    with os.scandir("/dev") as entries:
        disks = [e.path for e in entries if _is_block_device(e)]
    for path in disks:
        _mount_device(os.devnull, path)


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


def _let_end() -> None:
    """In the agent's process: a termination ends it, one that waits at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _forward_terminations(agent: int) -> None:
    """A termination is blocked before the agent is started, so that one that arrives meanwhile is
    not lost: it is for the agent's group, which is there now."""

    def forward(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent, number)

    with contextlib.suppress(OSError):  # it has done so, or has ended
        os.setpgid(agent, agent)
    signal.signal(signal.SIGTERM, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


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


def _mount_device(device: str, target: str) -> None:
    """Devices can be written to on a read-only mount, too; their rights cannot be changed there,
    which are the machine's."""
    _mount(device, target, None, MS_BIND)
    _remount_read_only(target)


def _remount_read_only(path: str) -> None:
    # A remount must keep the flags that are locked in a user namespace.
    options = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount(None, path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | options)


def _set_attributes(path: str, attributes: int, flags: int, folder: int = AT_FDCWD) -> None:
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    size = ctypes.c_size_t(len(packed))
    _syscall(MOUNT_SETATTR, folder, os.fsencode(path), flags, packed, size)


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
        enter(Files((), (), ()), body)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    _try()
