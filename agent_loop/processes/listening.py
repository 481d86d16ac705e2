"""The TCP ports on which a run's processes listen, so that they can be refused to its agents.

Processes in another PID namespace, which are agents behind a wall, do not count: an agent's server
must stay reachable for it. A process that is not root's does not see the descriptors of processes
that hold secrets; their ports must be known in another way.

The machine's listening sockets are read each time, from the kernel's `sock_diag` (netlink), which
takes microseconds. Whose they are takes milliseconds, and is looked up only if they have changed,
or after a while, because a socket can be handed from a process to another one during a look.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTEN = 10
"""The state of a listening socket."""
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
REQUEST = struct.Struct("=LHHLL BBBBL 48x")
"""`nlmsghdr`, then `inet_diag_req_v2` for all sockets of a family in given states."""
HEADER = struct.Struct("=LHHLL")
STATUS = struct.Struct("=i")
"""The end of a dump: 0, or the negative number of the error that ended it."""
SOCKET = struct.Struct("=4x 2s 62x L")
"""The port (big-endian) and the inode of an `inet_diag_msg`."""
REPLY_BYTES = 1 << 16

Sockets = dict[str, int]
"""`socket:[INODE]` of every listening socket → its port."""


class ListeningPorts:
    """The ports on which processes and their descendants listen. May be used by several threads.

    Example: ListeningPorts([os.getpid()]).now()
    """

    def __init__(self, roots: Iterable[int], *, kept_s: float = 5.0) -> None:
        """`kept_s`: for how long owners are taken to be the same, if the sockets are."""
        self._roots = list(roots)
        self._kept_s = kept_s
        self._lock = threading.Lock()
        self._sockets: Sockets | None = None
        self._ports: frozenset[int] = frozenset()
        self._looked_at = 0.0

    def now(self) -> frozenset[int]:
        """Their ports now, at any address."""
        with self._lock:
            sockets = listening_sockets()
            known_s = time.monotonic() - self._looked_at
            if sockets != self._sockets or known_s > self._kept_s:
                self._looked_at = time.monotonic()
                self._ports = frozenset(_owned(sockets, self._roots))
                self._sockets = sockets
            return self._ports


def listening_sockets() -> Sockets:
    """All listening TCP sockets of this network namespace."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            families = (socket.AF_INET, socket.AF_INET6)
            return {name: port for family in families for name, port in _dumped(kernel, family)}
    except OSError:  # a kernel without it, or a container that refuses it
        return _from_proc()


def _dumped(kernel: socket.socket, family: int) -> Iterator[tuple[str, int]]:
    kind = (SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP)
    inet = (family, socket.IPPROTO_TCP, 0, 0, 1 << LISTEN)
    kernel.send(REQUEST.pack(REQUEST.size, *kind, 0, 0, *inet))
    while True:
        reply = kernel.recv(REPLY_BYTES)
        at = 0
        while at < len(reply):
            size, what, *_ = HEADER.unpack_from(reply, at)
            is_refused = what == NLMSG_DONE and STATUS.unpack_from(reply, at + HEADER.size) != (0,)
            if what == NLMSG_ERROR or is_refused:
                raise OSError(errno.EOPNOTSUPP, "the kernel refuses sock_diag")
            if what == NLMSG_DONE:
                return
            port, inode = SOCKET.unpack_from(reply, at + HEADER.size)
            yield f"socket:[{inode}]", int.from_bytes(port, "big")
            at += -(-size // 4) * 4  # messages begin at multiples of 4 bytes


def _from_proc() -> Sockets:
    found: Sockets = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if int(state, 16) == LISTEN:
                    found[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    return found


def _owned(sockets: Sockets, roots: Iterable[int]) -> Iterator[int]:
    """The ports of those that these processes and their descendants hold."""
    here = os.readlink("/proc/self/ns/pid")
    for pid in _trees(roots, here):
        with contextlib.suppress(OSError):  # it has ended, or may not be read
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if port := sockets.get(os.readlink(f"/proc/{pid}/fd/{fd}")):
                        yield port


def _trees(roots: Iterable[int], namespace: str) -> Iterable[int]:
    pending, seen = list(roots), set[int]()
    while pending:
        pid = pending.pop()
        if pid in seen or _is_elsewhere(pid, namespace):
            continue
        seen.add(pid)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8")
                pending += map(int, children.split())
    return seen


def _is_elsewhere(pid: int, namespace: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != namespace
    except OSError:
        return False
