"""The admin key always exists, is kept in a private file, and is the same for all processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.admin_key import client_key, kept_files, key_file, with_admin_key
from proxy.app import build_app, document_parts
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import ProxyConfig, load_config
from proxy.errors import ConfigurationError
from proxy.http.route import Who
from proxy.keys import kept_key
from proxy.settings.state_folder import default_store, make_state_folder
from proxy.testing.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]


def key_of(config: ProxyConfig) -> str:
    key = with_admin_key(config).admin_key
    assert key is not None
    return key.get_secret_value()


def test_key_file_that_is_not_a_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigurationError, match=r"admin_key_file: .*/key is not a text in UTF-8"):
        with_admin_key(load_config(admin_key_file=tmp_path / "key"))


def test_key_is_created_in_a_private_file_next_to_the_store_and_reused(tmp_path: Path) -> None:
    config = load_config(store=f"sqlite:///{tmp_path}/s.db")
    first = key_of(config)
    path = tmp_path / "s.db.admin-key"
    assert len(first) >= 40
    assert path.read_text().strip() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_of(config) == first
    assert list(tmp_path.iterdir()) == [path]


def test_processes_that_start_concurrently_get_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(kept_key, [path] * 64))
    assert keys == {path.read_text().strip()}
    assert list(tmp_path.iterdir()) == [path]


def test_configured_key_overrides_the_environment_and_both_override_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    (tmp_path / "s.db.admin-key").write_text("from the file\n")
    assert key_of(load_config(store=store)) == "from the file"
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "from the environment")
    assert key_of(load_config(store=store)) == "from the environment"
    assert key_of(load_config(store=store, admin_key="given")) == "given"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"store": "sqlite:////data/s.db"}, "/data/s.db.admin-key"),
        ({"store": "/data/s.db"}, "/data/s.db.admin-key"),
        ({"store": "postgresql://u:p@host/db"}, "/state/agentic-proxy/admin-key"),
        ({"store": "postgresql://host/db", "admin_key_file": "/etc/key"}, "/etc/key"),
    ],
)
def test_default_path_of_the_key_file(
    settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert key_file(load_config(**settings)) == Path(expected)


def test_unusable_key_file_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("file", "file/key"):
        with pytest.raises(ConfigurationError, match=rf"admin_key_file: {tmp_path}/{path} "):
            with_admin_key(load_config(admin_key_file=tmp_path / path))


def test_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "")
    with pytest.raises(ConfigurationError, match="admin_key"):
        load_config()


def test_build_app_refuses_a_configuration_without_an_admin_key(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match="admin_key"):
        build_app(load_config(model=checkpoint))


def test_agents_do_not_see_the_address_of_the_users_vllm() -> None:
    assert default_store().with_name("vllm.url") in kept_files()


def test_client_reads_the_key_file_only_for_a_proxy_on_this_machine() -> None:
    assert client_key("http://127.0.0.1:8000", {}) is None
    (make_state_folder() / "sessions.db.admin-key").write_text("kept\n")
    assert client_key("http://127.0.0.1:8000", {}) == "kept"
    assert client_key("http://localhost:8000", {}) == "kept"
    assert client_key("http://proxy.example.org", {}) is None
    given = {"AGENTIC_PROXY_ADMIN_KEY": "given"}
    assert client_key("http://proxy.example.org", given) == "given"


def test_client_reads_the_key_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    assert path not in kept_files()
    environment = {"AGENTIC_PROXY_ADMIN_KEY_FILE": str(path)}
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY_FILE", str(path))
    assert path in kept_files()
    path.write_text("new\nold\n")
    assert client_key("http://proxy.example.org", environment) == "new"
    given = environment | {"AGENTIC_PROXY_ADMIN_KEY": "given"}
    assert client_key("http://proxy.example.org", given) == "given"
    for unusable in (lambda: path.write_text("\n"), path.unlink):
        unusable()
        with pytest.raises(ConfigurationError, match=f"_FILE: {path} has no admin key"):
            client_key("http://proxy.example.org", environment)


@asynccontextmanager
async def serving(checkpoint: Path, engine: str, folder: Path, *more: str) -> AsyncIterator[str]:
    """Runs `agentic-proxy serve` in `folder` without a configured key; yields its URL."""
    argv = ["-m", "proxy", "serve", "--model", str(checkpoint), "--engine", engine, "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *argv, "--auto-create", *more),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    said = [(await process.stdout.readline()).decode() for _ in range(3)]
    try:
        assert said[2] == f"the admin key is in {default_store()}.admin-key\n"
        yield said[0].split()[3].rstrip(",")
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--workers", "2")], ids=["one process", "two processes"])
async def test_serve_creates_a_key_that_every_control_route_needs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)  # where a client looks for the key file
    monkeypatch.delenv("AGENTIC_PROXY_ADMIN_KEY", raising=False)
    async with (
        ScriptedEngine(lambda prompt: [*prompt[-3:], 257]) as engine,
        serving(checkpoint, engine.url, tmp_path, *more) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        for route in filter(attrgetter("documented"), document_parts()[0].routes):
            target = url + re.sub(r"\{[^}]*\}", "x", route.path)
            async with http.request(route.method, target, json={}) as response:
                assert (response.status == 401) is (route.who is not Who.ANYONE), route.path
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        async with http.post(f"{url}/mine/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        for _ in range(8):  # each connection may reach another process
            async with ProxyClient(url) as control:
                assert (await control.get_turns("mine"))[0].session_id == "mine"
        async with ProxyClient(url, "not the key") as stranger:
            with pytest.raises(ProxyClientError) as refused:
                await stranger.get_turns("mine")
        assert refused.value.status == 401
