"""The parts of a Ray cluster on this machine, which agents must not reach.

Anyone who can reach Ray's ports and has its token can run code on every node. Invariant: the
token's files are hidden even if this machine cannot refuse connections to ports.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import ray

from agent_loop.processes.listening import ListeningPorts

PORTS = (
    "NodeManagerPort",
    "ObjectManagerPort",
    "MetricsExportPort",
    "MetricsAgentPort",
    "DashboardAgentListenPort",
    "RuntimeEnvAgentPort",
)
"""The keys of `ray.nodes()` that hold ports; -1: none."""
CLIENT_PORT, DASHBOARD_PORT = 10001, 8265
"""Ray's own defaults, on which `ray start --head` listens on any node."""


@dataclass(frozen=True, slots=True)
class RayHere:
    """The cluster that this process is connected to. Example: RayHere.find().ports"""

    folder: Path
    """Folder of all sessions on this machine: sockets, logs, ports. By default `/tmp/ray`."""
    tokens: tuple[Path, ...]
    ports: frozenset[int]
    """Ports of all nodes. Those of their workers can only be found on this machine, from
    `processes`."""
    processes: tuple[int, ...]
    """Ids of the cluster's own processes on this machine; its workers are their descendants."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """What agents must not see of it."""
        return self.folder, *self.tokens

    def ports_here(self) -> frozenset[int]:
        """The ports of all nodes, and now those of the workers on this machine."""
        return self.ports | ListeningPorts(self.processes).now()

    @classmethod
    def find(cls) -> Self:
        nodes = ray.nodes()
        context = ray.get_runtime_context()
        ports = {int(node.get(name, -1)) for node in nodes for name in PORTS}
        ports |= {int(context.gcs_address.rpartition(":")[2]), CLIENT_PORT, DASHBOARD_PORT}
        sockets = Path(nodes[0]["RayletSocketName"])
        return cls(
            folder=sockets.parents[2],
            tokens=_tokens(),
            ports=frozenset(port for port in ports if port > 0),
            processes=tuple(_named(context.get_session_name())),
        )


def _tokens() -> tuple[Path, ...]:
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path.home() / ".ray", *([Path(given)] if given else []))


def _named(session: str) -> list[int]:
    """Processes whose command line names the session."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if session.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
