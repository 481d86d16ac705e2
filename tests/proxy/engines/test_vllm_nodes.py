"""The arguments and variables of the parts of a vLLM server."""

from __future__ import annotations

import socket

from proxy.engines.vllm_nodes import ServerPart, interface_of, node_environment


def test_parts_meet_at_the_first_node_and_only_it_answers() -> None:
    first, second = (ServerPart(node, 2, "[fd00::1]:29500") for node in range(2))
    assert first.answers
    assert not second.answers
    common = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank"]
    meeting = ["--master-addr", "fd00::1", "--master-port", "29500"]
    assert first.arguments == [*common, "0", *meeting]
    assert second.arguments == [*common, "1", *meeting, "--headless"]


def test_interface_is_that_of_the_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert node_environment("127.0.0.1")["GLOO_SOCKET_IFNAME"] == loopback
    assert node_environment("192.0.2.1") == {"VLLM_HOST_IP": "192.0.2.1"}
