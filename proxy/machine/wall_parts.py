"""The parts of the wall around an agent (`proxy/wall.py`) that a kernel may not be able to hold."""

from __future__ import annotations

from collections.abc import Collection

from proxy import wall
from proxy.machine import landlock, seccomp

PARTS = {
    "ports": "agents can connect to the ports of this run's processes (Ray, torch, engines)",
    "processes": "a fork bomb meets no bound",
    "sockets": "agents can connect to abstract sockets of other processes",
}
"""By the names under which a run accepts that they are not held, and what this means."""


def lacking(accepted: Collection[str] = ()) -> dict[str, str]:
    """The parts that this machine does not hold, besides those accepted, with the reasons."""
    found = {
        "ports": landlock.missing() or seccomp.missing(),
        "processes": wall.missing_processes(),
        "sockets": landlock.missing_scopes() or seccomp.missing(),
    }
    return {name: why for name, why in found.items() if why is not None and name not in accepted}
