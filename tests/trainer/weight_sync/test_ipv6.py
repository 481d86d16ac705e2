"""Addresses of this machine where there is only IPv6."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proxy.engines.vllm_nodes import interface_of, node_environment
from proxy.machine.port import loopback
from tests.namespaces import ip, may_be_refused
from trainer.weight_sync.address import address_towards

PROGRAM = """
from proxy.engines.vllm_nodes import interface_of
from proxy.machine.port import free_port, loopback
from trainer.weight_sync.address import address_towards
print(loopback(), free_port(loopback()) > 0, address_towards("::1", 9), interface_of("::1"))
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_address_and_interface_of_either_family(host: str) -> None:
    assert address_towards(host, 9) == host
    assert interface_of(host) == "lo"
    assert node_environment(host) == {"VLLM_HOST_IP": host, "GLOO_SOCKET_IFNAME": "lo"}


def test_addresses_of_other_machines_have_no_interface_here() -> None:
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None
    assert loopback() == "127.0.0.1"


def test_a_machine_with_only_ipv6_listens_on_its_own_address() -> None:
    with may_be_refused():
        ip("netns", "add", "only-ipv6")
    try:
        inside = ["ip", "netns", "exec", "only-ipv6"]
        ip("-n", "only-ipv6", "link", "set", "lo", "up")
        ip("-n", "only-ipv6", "-4", "addr", "flush", "dev", "lo")
        done = subprocess.run(
            [*inside, sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
        )
        assert done.stdout.split() == ["::1", "True", "::1", "lo"]
    finally:
        ip("netns", "delete", "only-ipv6")
