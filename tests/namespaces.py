"""Network namespaces: machines of their own, as far as the network is concerned."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.needs import skip_or_fail

CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> str:
    """Runs `ip`. Raises CalledProcessError."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def may_be_refused() -> Iterator[None]:
    """Skips the test if this machine refuses the namespaces that the block makes."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a network namespace")
    if shutil.which("ip") is None:
        skip_or_fail("ip is not installed: apt-get install iproute2")
    try:
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.strip()}")


@contextmanager
def machines(count: int) -> Iterator[Sequence[tuple[str, str]]]:
    """Name and IP address of namespaces that reach each other and this machine over a bridge."""
    tag = secrets.token_hex(3)
    bridge, subnet = f"br-{tag}", f"10.232.{int(tag, 16) % 250}"
    made = [(f"m{number}-{tag}", f"{subnet}.{number + 2}") for number in range(count)]
    with ExitStack() as stack:
        with may_be_refused():
            ip("link", "add", bridge, "type", "bridge")
            stack.callback(ip, "link", "delete", bridge)
            ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for name, address in made:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
                ip("link", "add", name, "type", "veth", "peer", "eth0", "netns", name)
                ip("link", "set", name, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        yield made


def enter(name: str) -> None:
    """Moves the calling thread, and every process that it starts, to the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open("rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def processes(name: str) -> dict[int, str]:
    """Id and name of every process in the namespace."""
    found = {}
    for pid in map(int, ip("netns", "pids", name).split()):
        try:
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # it has ended
    return found
