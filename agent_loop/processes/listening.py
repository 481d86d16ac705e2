"""The TCP ports on which a run's processes listen, so that they can be refused to its agents.

Processes in another PID namespace, which are agents behind a wall, do not count: an agent's server
must stay reachable for it. A process that is not root's does not see the descriptors of processes
that hold secrets; their ports must be known in another way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"
"""The state of a listening socket in `/proc/net/tcp`."""


def listening_ports(roots: Iterable[int]) -> frozenset[int]:
    """The ports on which these processes and their descendants listen, at any address."""
    ports = _ports_by_inode()
    here = os.readlink("/proc/self/ns/pid")
    found: set[int] = set()
    for pid in _trees(roots, here):
        with contextlib.suppress(OSError):  # it has ended, or may not be read
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if port := ports.get(os.readlink(f"/proc/{pid}/fd/{fd}")):
                        found.add(port)
    return frozenset(found)


def _ports_by_inode() -> dict[str, int]:
    """`socket:[INODE]` of every listening socket → its port."""
    found: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a machine without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == LISTEN:
                    found[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    return found


def _trees(roots: Iterable[int], namespace: str) -> Iterable[int]:
    pending, seen = list(roots), set[int]()
    while pending:
        pid = pending.pop()
        if pid in seen or _is_elsewhere(pid, namespace):
            continue
        seen.add(pid)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                pending += map(int, children.split())
    return seen


def _is_elsewhere(pid: int, namespace: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != namespace
    except OSError:
        return False
