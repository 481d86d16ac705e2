"""The address of this machine in the networks of the engines."""

from __future__ import annotations

import errno
import socket


def address_towards(host: str, port: int) -> str:
    """The address at which the host can reach this machine, of IPv4 or IPv6.

    Raises:
        OSError: the host has no address, or no route leads to any of them.
    """
    failure = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for family, kind, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(target)  # sends nothing
            except OSError as error:
                failure = error
                continue
            return str(probe.getsockname()[0])
    raise failure
