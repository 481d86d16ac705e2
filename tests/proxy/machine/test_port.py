"""A port in use is an error that names the setting, on IPv4 and on IPv6."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from proxy.errors import ConfigurationError
from proxy.machine.port import HeldPort, free_port, http_url, usable_port
from tests.needs import needs
from tests.proxy.checkpoint import write_checkpoint

ROOT = Path(__file__).parents[3]


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


def test_a_held_port_is_for_its_server_only() -> None:
    """A server listens on it, and listens again; nobody else is given it."""
    held = HeldPort("engine port", "127.0.0.1", 0)
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, ranges.read_text().split()) if ranges.exists() else (0, 0)
    assert first <= held.port <= last
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", held.port))
            server.listen()
            with pytest.raises(ConfigurationError, match="in use"):
                usable_port("port", "127.0.0.1", held.port)
    given = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
    assert held.port not in {each.getsockname()[1] for each in given}
    for each in given:
        each.close()
    held.close()
    held.close()
    with socket.socket() as another:
        another.bind(("127.0.0.1", held.port))


def test_a_hold_ends_with_who_holds_it() -> None:
    port = HeldPort("engine port", "127.0.0.1", 0).port
    with socket.socket() as another:
        another.bind(("127.0.0.1", port))


def test_urls_have_ipv6_addresses_in_brackets() -> None:
    assert http_url("::1", 8000) == "http://[::1]:8000"
    assert http_url("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert http_url("gpu-0", 8000) == "http://gpu-0:8000"


@pytest.mark.parametrize("package", ["proxy", "agent_loop", "trainer", "harbor_sdk"])
def test_no_other_place_puts_host_and_port_together(package: str) -> None:
    """In an f-string that a person reads or a client connects to."""
    joined = re.compile(r"(https?|tcp)://\{[^}]*(host|address|reached|bind)[^}]*\}:\{")
    owners = {"proxy/machine/port.py", "harbor_sdk/server/serve.py"}
    for file in (ROOT / package).rglob("*.py"):
        if str(file.relative_to(ROOT)) not in owners:
            assert not joined.search(file.read_text("utf-8")), file


@needs(no_ipv6())
@pytest.mark.parametrize("workers", [1, 2])
def test_printed_url_of_an_ipv6_address_is_reached(tmp_path: Path, workers: int) -> None:
    serve = [sys.executable, "-m", "proxy", "serve", "--host", "::1", "--port", "0"]
    serve += ["--model", str(write_checkpoint(tmp_path / "model")), "--workers", str(workers)]
    serve += ["--engine", "http://[::1]:9", "--store", f"sqlite:///{tmp_path}/s.db"]
    with subprocess.Popen(
        serve, cwd=tmp_path, env=_here(), stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        try:
            url = next(
                word.strip(",") for word in ran.stdout.readline().split() if word.startswith("http")
            )
            assert url.startswith("http://[::1]:")
            assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        finally:
            ran.terminate()


def _here() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
