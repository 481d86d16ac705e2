"""A vLLM server whose workers are divided over several nodes.

Each node has a part of the server, which is a process of its own. The first part schedules and
answers calls; the others have only workers (vLLM's `--headless`). The parts talk over the network,
which must be trusted: neither vLLM's message queues nor torch's process groups have keys.

Invariant: every connection between the parts uses the address at which the part's node is known to
the others. vLLM and gloo would otherwise take the one to which the host's name resolves, which is
often a loopback address. A part does not notice that another one has ended; whoever starts the
parts ends all of them when one ends.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

HEADLESS = "--headless"
INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""ioctl: the IPv4 address of a network interface."""
IPV6 = 6
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""Of this machine: the address in hexadecimal digits first, the interface last in each line."""


@dataclass(frozen=True, slots=True)
class ServerPart:
    """Example: ServerPart(node=1, nodes=2, meeting="10.0.0.1:29500")"""

    node: int
    """0: the part that answers calls."""
    nodes: int
    """Number of parts. It divides the number of workers."""
    meeting: str
    """Address on node 0 at which the workers of all parts meet: HOST:PORT."""

    @property
    def answers(self) -> bool:
        """Whether this part answers calls; the others have only workers."""
        return self.node == 0

    @property
    def arguments(self) -> list[str]:
        """vLLM's arguments for this part."""
        host, _, port = self.meeting.rpartition(":")
        return [
            *("--distributed-executor-backend", "mp"),
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node)),
            *("--master-addr", host.strip("[]"), "--master-port", port),
            *([] if self.answers else [HEADLESS]),
        ]


def node_environment(host: str) -> dict[str, str]:
    """Variables by which a part on the node with this address uses it for every connection."""
    interface = interface_of(host)
    return {"VLLM_HOST_IP": host} | ({INTERFACE: interface} if interface else {})


def interface_of(host: str) -> str | None:
    """The network interface with this IP address; None: this machine has none."""
    address = ipaddress.ip_address(host)
    if address.version == IPV6:
        lines = [line.split() for line in IPV6_ADDRESSES.read_text("utf-8").splitlines()]
        found = (line[-1] for line in lines if bytes.fromhex(line[0]) == address.packed)
        return next(found, None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
