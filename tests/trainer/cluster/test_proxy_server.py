"""The proxy that a run starts, as a real process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from proxy.client import ProxyClient
from proxy.errors import ConfigurationError
from proxy.machine.port import free_port, usable_port
from proxy.records import SessionKind
from proxy.testing.scripted_engine import ScriptedEngine
from tests.processes import assert_all_end, watched
from tests.proxy.checkpoint import write_checkpoint
from trainer.cluster.proxy_server import ProxyProcess, ProxyServerConfig

pytestmark = pytest.mark.slow


async def test_environment_changes_nothing_that_the_run_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those of another proxy; what the run does not decide holds."""
    for name, value in {
        "PORT": str(free_port("127.0.0.1")),
        "HOST": "0.0.0.0",
        "STORE": f"sqlite:///{tmp_path}/another.db",
        "STORE_PASSWORD_FILE": str(tmp_path / "missing"),
        "MODEL": "/models/another",
        "ENGINES": "[]",
        "ADMIN_KEY": "another-key",
        "ADMIN_KEY_FILE": str(tmp_path / "missing"),
        "RENDERING__RENDERER": "none",
        "PUBLIC_URL": "http://outside:80",
        "WORKERS": "3",
        "LIMITS__BODY_BYTES": "2048",
    }.items():
        monkeypatch.setenv(f"AGENTIC_PROXY_{name}", value)
    monkeypatch.setenv("agentic_proxy_port", "1")
    run = tmp_path / "run"
    run.mkdir()
    async with ScriptedEngine(lambda _: [257]) as engine:
        settings = {
            "model": str(write_checkpoint(tmp_path / "model")),
            "store": f"sqlite:///{run}/sessions.db",
            "engines": [{"url": engine.url}],
            "rendering": {"renderer": "auto"},
        }
        server = ProxyProcess(ProxyServerConfig(), settings, run)
        try:
            await server.start()
            async with ProxyClient(server.url, server.admin_key) as control:
                session = await control.create_session("one", kind=SessionKind.TRAIN)
            headers = {"Authorization": f"Bearer {session.api_key}"}
            url = f"{session.base_url}/chat/completions"
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(url, data=b" " * 3000) as response,
            ):
                assert response.status == 413
        finally:
            await server.stop()
    assert (run / "sessions.db").is_file()
    assert not (tmp_path / "another.db").exists()
    assert session.base_url.startswith(server.url)


async def test_port_of_a_killed_proxy_cannot_be_taken_before_its_restart(tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: [257]) as engine:
        settings = {
            "model": str(write_checkpoint(tmp_path / "model")),
            "store": f"sqlite:///{tmp_path}/sessions.db",
            "engines": [{"url": engine.url}],
        }
        server = ProxyProcess(ProxyServerConfig(), settings, tmp_path)
        try:
            await server.start()
            url = server.url
            async with ProxyClient(url, server.admin_key) as control:
                assert await control.ready()
            os.kill(server.pid, signal.SIGTERM)
            await server.wait()
            with pytest.raises(ConfigurationError, match="in use"):
                usable_port("port", "127.0.0.1", urlsplit(url).port or 0)
            await server.start()
            assert server.url == url
            async with ProxyClient(url, server.admin_key) as control:
                assert await control.ready()
        finally:
            await server.stop()


async def test_begun_proxy_waits_for_its_engines_and_ends_without_them(tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: [257]) as engine:
        settings = {
            "model": str(write_checkpoint(tmp_path / "model")),
            "store": f"sqlite:///{tmp_path}/sessions.db",
        }
        server = ProxyProcess(ProxyServerConfig(), settings, tmp_path)
        await server.begin()
        begun = server.pid
        await server.set_engines([{"url": engine.url, "name": "the-engine"}])
        await server.start()
        assert server.pid == begun
        async with ProxyClient(server.url, server.admin_key) as control:
            assert [each["name"] for each in await control.engines()] == ["the-engine"]
        await server.stop()

        await server.begin()  # of a run whose engines then do not start
        running = {os.pidfd_open(server.pid): "the guard"} | watched(server.pid)
        await server.stop()
        assert_all_end(running)
