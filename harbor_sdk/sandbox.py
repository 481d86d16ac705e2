"""A private copy of this machine for one trial, without Docker: namespaces over an overlay of `/`.

Invariant: a process in the sandbox cannot change a file, see a process, or read a hidden folder of
the machine or of another sandbox. When the sandbox stops, everything that was written in it is
gone. It stops when its owner's process ends for any reason, because its first process waits on a
pipe of the owner.

Limits: sandboxes share the machine's network, processors and, up to `size_mb` for each sandbox, its
memory. The readable files of `/` can be read, except in `hidden` folders. File systems mounted
below `/` are empty in the sandbox unless they are bound. Linux only, with util-linux.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

OutputCallback = Callable[[str, Literal["stdout", "stderr"]], Awaitable[None]]

START_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 1.0
"""How long output is read after a command has ended; a background child may keep the pipe open."""
MAX_OUTPUT_BYTES = 16 * 2**20
"""Number of bytes of stdout, and of stderr, that are kept. Later output is read and dropped."""
CHUNK_BYTES = 64 * 2**10

# Docker's default set without mknod, which would give access to the machine's disks, and net_raw,
# which would to what all its processes send each other.
_CAPABILITIES = (
    "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+setfcap,"
    "+net_bind_service,+sys_chroot,+audit_write"
)
_CAP_SYS_ADMIN = 21
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TRUNCATED = b"\n[output cut here: more than %d bytes]\n" % MAX_OUTPUT_BYTES


class SandboxError(RuntimeError):
    """The sandbox could not be set up, or has been stopped. The message names the missing part."""


class SandboxTimeout(SandboxError):
    """A command was ended at its time limit."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A folder or file of the machine, mounted in the sandbox at `target`."""

    source: Path
    target: Path
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The output and the exit code of a command that has ended."""

    stdout: bytes
    stderr: bytes
    return_code: int


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox contains.

    `size_mb` bounds the size of all written files, which are kept in memory. `hidden` files and
    folders are empty in the sandbox. If a hidden folder and a bind overlap, the inner one takes
    effect; at the same path, the bind does.
    """

    binds: Sequence[Bind] = ()
    hidden: Sequence[Path] = ()
    size_mb: int = 4096
    shm_bytes: int = 256 << 20
    """Size of `/dev/shm`, and of System V shared memory."""
    processes: int | None = None
    """Number of processes and threads at the same time; None: no bound. Needs Linux 6.14."""


def require_privilege() -> None:
    """Raises `SandboxError` if this process may not mount, or if a program is missing."""
    effective = 0
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    if not effective >> _CAP_SYS_ADMIN & 1:
        raise SandboxError(
            "this process does not have CAP_SYS_ADMIN, which a local sandbox needs (mount, overlay "
            "and PID namespaces): run as root, start the container with `--cap-add SYS_ADMIN`, or "
            "choose another environment of Harbor, such as docker"
        )
    missing = [p for p in ("unshare", "nsenter", "setpriv", "mount", "bash") if not shutil.which(p)]
    if missing:
        raise SandboxError(
            f"a local sandbox needs {', '.join(missing)}, not found on PATH: install util-linux "
            "and bash"
        )


class Sandbox:
    """A running sandbox, made by `Sandbox.start` and ended by `stop`. `run` can be called any
    number of times, also concurrently."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @property
    def pid(self) -> int:
        """Id of the process that waits for the sandbox's first process, in its namespaces except
        the PID namespace, which is that of its children."""
        return self._process.pid

    @classmethod
    async def start(cls, spec: SandboxSpec) -> Sandbox:
        require_privilege()
        folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
            "bash",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": DEFAULT_PATH},  # the sandbox can read them in /proc/1/environ
            start_new_session=True,
        )
        sandbox = cls(process, folder)
        try:
            await asyncio.wait_for(sandbox._set_up(spec), START_TIMEOUT_S)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def run(
        self,
        command: str,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: str | int = "root",
        timeout_s: float | None = None,
        stdin: BinaryIO | None = None,
        stdout: BinaryIO | None = None,
        on_output: OutputCallback | None = None,
    ) -> Completed:
        """Runs `bash -c command` with the variables of `env`, HOME, USER and PATH.

        `stdin` and `stdout` are files with a descriptor. Output to the file `stdout` is not
        returned.

        Raises:
            SandboxTimeout: after `timeout_s`; the process group has been ended.
            SandboxError: the sandbox has been stopped.
        """
        async with self._process_in(command, cwd, env or {}, user, stdin, stdout) as (
            process,
            streams,
        ):
            try:
                return await asyncio.wait_for(_finish(process, streams, on_output), timeout_s)
            except TimeoutError as error:
                raise SandboxTimeout(f"Command timed out after {timeout_s} seconds") from error

    async def stop(self) -> None:
        """Ends every process in the sandbox and discards its files. Stopping again is not an
        error."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), DRAIN_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _set_up(self, spec: SandboxSpec) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.write(_setup_script(self._folder, spec).encode())
        if await self._process.stdout.readline() != b"ready\n":
            reason = (await self._process.stderr.read()).decode(errors="replace").strip()
            raise SandboxError(f"the local sandbox could not be set up: {reason}")

    @asynccontextmanager
    async def _process_in(
        self,
        command: str,
        cwd: str,
        env: Mapping[str, str],
        user: str | int,
        stdin: BinaryIO | None,
        stdout: BinaryIO | None,
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[asyncio.StreamReader]]]:
        if self._process.returncode is not None:
            raise SandboxError("the sandbox has been stopped")
        outside = f"/proc/{self._process.pid}"
        async with _output_pipes() as (streams, write_ends):
            process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--mount={outside}/ns/mnt", f"--pid={outside}/ns/pid_for_children"),
                *(f"--ipc={outside}/ns/ipc", f"--uts={outside}/ns/uts", f"--root={outside}/root"),
                *("--", "setsid", "/bin/bash", "-c", _RUN_SCRIPT, "run", str(user), cwd, command),
                stdin=stdin or asyncio.subprocess.DEVNULL,
                stdout=stdout or write_ends[0],
                stderr=write_ends[1],
                env={"PATH": DEFAULT_PATH, **env},
                start_new_session=True,
            )
            for write_end in write_ends:
                write_end.close()
            try:
                yield process, streams
            finally:
                if process.returncode is None:
                    _kill_inside(process.pid)
                    await process.wait()


@asynccontextmanager
async def _output_pipes() -> AsyncIterator[tuple[list[asyncio.StreamReader], list[BinaryIO]]]:
    """Pipes for stdout and stderr, and their readers. With asyncio's own pipes, `wait()` would
    wait until background children close them."""
    loop = asyncio.get_running_loop()
    readers: list[asyncio.StreamReader] = []
    ends: list[BinaryIO] = []
    transports: list[asyncio.ReadTransport] = []
    try:
        for _ in range(2):
            read_fd, write_fd = os.pipe()
            ends.append(os.fdopen(write_fd, "wb", 0))
            readers.append(asyncio.StreamReader())
            transport, _protocol = await loop.connect_read_pipe(
                partial(asyncio.StreamReaderProtocol, readers[-1]), os.fdopen(read_fd, "rb", 0)
            )
            transports.append(transport)
        yield readers, ends
    finally:
        for end in ends:
            end.close()
        for transport in transports:
            transport.close()


def _kill_inside(nsenter_pid: int) -> None:
    """Ends the command's session. `nsenter` itself must live to reap it; otherwise the machine's
    init inherits the zombie, and the sandbox cannot end until init reaps it."""
    try:
        children = (
            Path(f"/proc/{nsenter_pid}/task/{nsenter_pid}/children")
            .read_text(encoding="utf-8")
            .split()
        )
        for child in children:
            try:
                os.killpg(int(child), signal.SIGKILL)
            except ProcessLookupError:  # it has not become a session yet
                os.kill(int(child), signal.SIGKILL)
        if not children:
            os.kill(nsenter_pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


async def _finish(
    process: asyncio.subprocess.Process,
    streams: list[asyncio.StreamReader],
    on_output: OutputCallback | None,
) -> Completed:
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    readers = [
        asyncio.create_task(_read(streams[0], "stdout", kept["stdout"], on_output)),
        asyncio.create_task(_read(streams[1], "stderr", kept["stderr"], on_output)),
    ]
    try:
        await process.wait()
        await asyncio.wait(readers, timeout=DRAIN_TIMEOUT_S)
        for reader in readers:
            if reader.done():
                reader.result()
    finally:
        for reader in readers:
            reader.cancel()
    return Completed(bytes(kept["stdout"]), bytes(kept["stderr"]), process.returncode or 0)


async def _read(
    stream: asyncio.StreamReader,
    name: Literal["stdout", "stderr"],
    kept: bytearray,
    on_output: OutputCallback | None,
) -> None:
    while chunk := await stream.read(CHUNK_BYTES):
        if on_output is not None:
            await on_output(chunk.decode(errors="replace"), name)
        if len(kept) < MAX_OUTPUT_BYTES:
            kept += chunk
            if len(kept) >= MAX_OUTPUT_BYTES:
                kept += _TRUNCATED


# $1 user, $2 folder, $3 command. `getent` takes a name or a number; a number need not exist.
_RUN_SCRIPT = (
    r"""
if [ "$1" = root ] || [ "$1" = 0 ]; then name=root uid=0 gid=0 home=/root
elif entry=$(getent passwd "$1"); then IFS=: read -r name _ uid gid _ home _ <<< "$entry"
elif [[ "$1" =~ ^[0-9]+$ ]]; then name=$1 uid=$1 gid=$1 home=/
else echo "user '$1' does not exist in the sandbox: create it in the task's setup" >&2; exit 126; fi
cd "$2" || exit 126
export HOME="${HOME:-$home}" USER="${USER:-$name}"
groups=--clear-groups; [ -z "$entry" ] || groups=--init-groups
exec setpriv --reuid "$uid" --regid "$gid" $groups --bounding-set """
    + _CAPABILITIES
    + r""" --inh-caps=-all -- /bin/bash -c "$3"
"""
)


def _setup_script(folder: Path, spec: SandboxSpec) -> str:
    """The script of the first process in the new PID namespace. It prints `ready` and waits for
    EOF."""
    mounts = [(path, _hide(number, path)) for number, path in enumerate(spec.hidden)]
    mounts += [(bind.target, _bind(bind)) for bind in spec.binds]
    mounts.sort(key=lambda mount: len(mount[0].parts))  # outer ones first
    return "\n".join(
        [
            "set -eu",
            f"base={shlex.quote(str(folder))}; root=$base/root",
            f'mount -t tmpfs -o size={spec.size_mb}m,mode=0755,nodev sandbox "$base"',
            f"shm={spec.shm_bytes}",
            _SETUP_ROOT,
            _BOUND_IPC,
            _bound(spec.processes),
            _PROC_READ_ONLY,
            *(script for _, script in mounts),
            _SETUP_END,
        ]
    )


def _bound(processes: int | None) -> str:
    """The kernel does not use the first 300 ids again once all others were used."""
    return "" if processes is None else f'echo {processes + 300} > "$root/proc/sys/kernel/pid_max"'


def _hide(number: int, path: Path) -> str:
    inside = f'"$root"{shlex.quote(str(path))}'
    store = f'"$base/hidden/{number}"'
    if path.is_file():
        make = f'mkdir -p "$base/hidden"; : > {store}; {_make_file(inside)}'
        return f"{make}; mount --bind {store} {inside}"
    return f"mkdir -p {store} {inside}; chmod 755 {store}; mount --bind {store} {inside}"


def _make_file(inside: str) -> str:
    return f'mkdir -p "$(dirname {inside})"; [ -e {inside} ] || : > {inside}'


def _bind(bind: Bind) -> str:
    source, inside = shlex.quote(str(bind.source)), f'"$root"{shlex.quote(str(bind.target))}'
    make = f"mkdir -p {inside}" if bind.source.is_dir() else _make_file(inside)
    mount = f"mount --rbind {source} {inside}"
    return f"{make}; {mount}" + (f"; mount -o remount,bind,ro {inside}" if bind.read_only else "")


# `lowerdir=/` contains only the root file system, so the mounts below it are made again.
_SETUP_ROOT = r"""
mkdir "$base"/{upper,work,root,tmp,run}
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work,nodev" overlay "$root"
mkdir -p "$root"/{proc,sys,dev,tmp,run}
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t tmpfs -o mode=0755,nosuid,size=64k dev "$root/dev"
for node in null zero full random urandom tty; do
  : > "$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"
  mount -o remount,bind,ro "$root/dev/$node"  # can be written to, but has the machine's rights
done
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,nosuid,noexec devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev,size=$shm shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"
for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${n%%:*}" "$root/dev/${n#*:}"; done
resolv=$(cat /etc/resolv.conf 2>/dev/null || true)
chmod 1777 "$base/tmp"; mount --bind "$base/tmp" "$root/tmp"
mkdir "$base/run/lock"; mount --bind "$base/run" "$root/run"
rm -f "$root/etc/resolv.conf"; printf '%s\n' "$resolv" > "$root/etc/resolv.conf"
"""
# System V shared memory has the size of /dev/shm, and its message queues 1 MiB in sum.
_BOUND_IPC = r"""
echo $((shm / $(getconf PAGESIZE))) > "$root/proc/sys/kernel/shmall"
echo 64 > "$root/proc/sys/kernel/msgmni"
"""
# Root could change the machine through these: `core_pattern` names a program that the kernel runs.
_PROC_READ_ONLY = r"""
for part in sys sysrq-trigger irq bus fs; do
  if [ -e "$root/proc/$part" ]; then
    mount --bind "$root/proc/$part" "$root/proc/$part"
    mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/$part"
  fi
done
"""
_SETUP_END = r"""
mkdir "$root/.outside"; cd "$root"; pivot_root . .outside
cd /; umount -l /.outside; rmdir /.outside
echo ready; exec 1>&- 2>&-
while read -r _; do :; done
"""
