"""What a recorder writes is its owner's alone, and it sends nothing anywhere but to its engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.client import ProxyClient
from proxy.rendering.rendering import Rendering
from proxy.settings.state_folder import make_state_folder
from proxy.testing.scripted_engine import ScriptedEngine
from tests.namespaces import enter, ip, may_be_refused
from tests.proxy.conftest import ADMIN_KEY
from tests.proxy.extras.secrets.planted import planted
from tests.proxy.processes.test_workers import ask, two_workers

pytestmark = pytest.mark.slow
OUTSIDE = ("203.0.113.1", 443)
IPV4 = 0x0800


@pytest.fixture
def alone() -> Iterator[str]:
    """A machine that could reach any address, by a cable that ends at `hole`."""
    name = f"alone-{secrets.token_hex(3)}"
    with ExitStack() as stack:
        with may_be_refused():
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "out", "type", "veth", "peer", "name", "hole")
            ip("-n", name, "addr", "add", "198.51.100.2/24", "dev", "out")
            ip("-n", name, "link", "set", "out", "arp", "off", "up")
            ip("-n", name, "link", "set", "hole", "up")
            ip("-n", name, "route", "add", "default", "dev", "out")
        yield name


def arrived(hole: socket.socket) -> list[str]:
    """The IPv4 addresses to which something was sent since the last call."""
    found = []
    with suppress(BlockingIOError):
        while True:
            packet = hole.recv(2048)
            found.append(socket.inet_ntoa(packet[30:34]))
    return found


async def record_and_look(checkpoint: Path, rendering: Rendering, folder: Path) -> None:
    """A session with secrets, the page, an export."""
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = [*rendering.tokenizer.encode("Done, thank you."), end]
    async with ScriptedEngine(lambda _: answer) as engine:
        with two_workers(checkpoint, engine.url, folder) as (url, _):
            async with ProxyClient(url, ADMIN_KEY) as control, aiohttp.ClientSession() as http:
                session = await control.create_session()
                texts = [each.text for each in planted(7, 50)]
                messages: list[dict[str, Any]] = [{"role": "user", "content": t} for t in texts]
                status, reply = await ask(session, messages)
                assert status == 200, reply
                headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
                for path in ("sessions", f"turns?session={session.trial_id}&turns=0", "state"):
                    async with http.get(f"{url}/view/{path}", headers=headers) as shown:
                        assert shown.status == 200
                        await shown.read()
                await control.complete(session.trial_id)
            argv = [sys.executable, "-m", "proxy", "export", "--model", str(checkpoint)]
            argv += ["--store", f"sqlite:///{folder}/shared.sqlite", "--out", f"{folder}/out.jsonl"]
            done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_recorder_connects_to_its_engine_only(
    alone: str, checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> None:
    found: dict[str, list[str]] = {}

    def inside() -> None:
        enter(alone)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IPV4)) as hole:
            hole.bind(("hole", IPV4))
            hole.setblocking(False)
            asyncio.run(record_and_look(checkpoint, rendering, tmp_path))
            found["recorder"] = arrived(hole)
            with socket.socket() as other, suppress(OSError):
                other.settimeout(0.2)
                other.connect(OUTSIDE)
            found["other"] = arrived(hole)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found["other"] == [OUTSIDE[0]], "what is sent outside is not seen"
    assert found["recorder"] == []


def test_what_it_writes_is_for_its_owner_only(
    checkpoint: Path, rendering: Rendering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask of whoever starts it is."""
    home, store = tmp_path / "home", tmp_path / "store"
    store.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    before = os.umask(0)
    try:
        state = make_state_folder()
        asyncio.run(record_and_look(checkpoint, rendering, store))
    finally:
        os.umask(before)
    written = [path for path in (*home.rglob("*"), *store.rglob("*")) if path.name != "out.jsonl"]
    assert store / "shared.sqlite" in written
    for path in written:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_file():
            assert mode & 0o077 == 0, f"{path} has the mode {mode:o}"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
