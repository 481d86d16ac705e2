"""Ports to listen on.

Invariant: a port that is in use is reported with its setting before a process is started on it.
"""

from __future__ import annotations

import socket
import weakref

from proxy.errors import ConfigurationError

MAX_PORT = 65_535
BACKLOG = 4096
"""Connections that may wait until a busy server accepts them: thousands of agents connect at once.
Others' requests are sent again by TCP after seconds, or reset. The kernel has a limit of its own
(`net.core.somaxconn`)."""


def usable_port(setting: str, host: str, port: int) -> int:
    """Returns `port`, or a free port if it is 0. `setting` is the name of the port's setting.

    Raises:
        ConfigurationError: the process cannot listen there.
    """
    with socket.socket(family(host)) as probe:
        bind_socket(probe, setting, host, port)
        return int(probe.getsockname()[1])


def bind_socket(unbound: socket.socket, setting: str, host: str, port: int) -> None:
    """Binds it to `port`, or to a free port if it is 0. `setting` is the name of the port's
    setting.

    Raises:
        ConfigurationError: the process cannot listen there.
    """
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        unbound.bind((host, port))
    except OSError as error:
        raise unusable_port(setting, host, port, error) from error


class HeldPort:
    """A port that no other process is given while its server starts, which takes a minute.

    The server, which sets SO_REUSEADDR as all do, can listen on it; who asks the system for a free
    port does not get it.
    """

    def __init__(self, setting: str, host: str, port: int) -> None:
        """Port 0 is any free port. Raises ConfigurationError: the process cannot listen there."""
        bound = socket.socket(family(host))
        self.close = weakref.finalize(self, bound.close)
        """Ends the hold. Does nothing the second time."""
        bind_socket(bound, setting, host, port)
        self.port = int(bound.getsockname()[1])


def free_port(host: str) -> int:
    """A port on which no process listens now."""
    return usable_port("port", host, 0)


def loopback() -> str:
    """This machine's own address: `127.0.0.1`, or `::1` where there is no IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def unusable_port(setting: str, host: str, port: int, error: OSError) -> ConfigurationError:
    """The error for a port on which the operating system refuses to listen."""
    return ConfigurationError(
        f"{setting}={port}: cannot listen on {host_and_port(host, port)} ({error.strerror}); free "
        "the port, choose another one, or set 0 for a free one"
    )


def http_url(host: str, port: int) -> str:
    """Example: http_url("::1", 8000) is "http://[::1]:8000"."""
    return f"http://{host_and_port(host, port)}"


def host_and_port(host: str, port: int) -> str:
    """As in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    """The address family of an IP address; a name has IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
