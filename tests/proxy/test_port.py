"""A port in use is an error that names the setting, on IPv4 and on IPv6."""

from __future__ import annotations

import socket

import pytest

from proxy.errors import ConfigurationError
from proxy.port import free_port, usable_port
from tests.needs import needs


def no_ipv6() -> str | None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"no IPv6 on loopback: {error}"
    return None


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs(no_ipv6()))])
def test_port_in_use_is_refused_with_its_setting(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"^engine\.port={port}: .*in use"):
            usable_port("engine.port", host, port)
    assert usable_port("engine.port", host, port) == port


def test_port_0_becomes_a_free_port() -> None:
    port = usable_port("port", "127.0.0.1", 0)
    assert port > 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port("127.0.0.1")))
