"""`agentic-proxy doctor`: every fault that it names, and nothing where all is well."""

from __future__ import annotations

import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy.cli import main
from proxy.commands.doctor import Finding, findings
from proxy.machine.port import free_port
from proxy.settings.state_folder import default_store, make_state_folder
from proxy.store import open_store
from tests.company_network import PrivateAuthority
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("AGENTIC_PROXY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AGENTIC_PROXY_PORT", str(free_port("127.0.0.1")))
    return folder


async def found(**given: Any) -> dict[str, list[Finding]]:
    """The findings by what they are about."""
    nothing = dict.fromkeys(("config", "store", "url", "model", "engine"))
    by: dict[str, list[Finding]] = {}
    async for each in findings(Namespace(**nothing | given)):
        by.setdefault(each.about, []).append(each)
    return by


def grades(by: dict[str, list[Finding]], about: str) -> list[str]:
    return [each.grade for each in by.get(about, [])]


def test_nothing_is_wrong_where_nothing_is_and_nothing_is_made(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"note   store: sqlite:///{default_store()} does not exist" in said
    assert "start one with `agentic-proxy serve" in said
    assert "\nfault" not in said
    assert list(empty_folder.iterdir()) == []


async def test_a_proxy_that_serves_is_well(
    proxy: RunningProxy, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", ADMIN_KEY)
    by = await found(url=proxy.url, model=checkpoint)
    assert grades(by, "proxy") == ["ok"]
    assert grades(by, "model") == ["ok"]
    engines = [name for name in by if name.startswith("engine ")]
    assert engines
    assert all(grades(by, name) == ["ok"] for name in engines)
    assert not [each for some in by.values() for each in some if each.grade == "fault"]


async def test_a_wrong_key_and_another_server_are_named(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", "another")
    by = await found(url=proxy.url)
    assert grades(by, "proxy") == ["ok", "fault"]
    assert "401" in by["proxy"][1].text or "key" in by["proxy"][1].text
    by = await found(engine=[f"http://127.0.0.1:{free_port('127.0.0.1')}", proxy.url])
    assert grades(by, "engine") == ["fault", "ok"]


async def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    authority = PrivateAuthority(tmp_path, "localhost")
    async with authority.serving(web.Application()) as port:
        by = await found(url=f"https://localhost:{port}")
    assert grades(by, "proxy") == ["fault"]
    assert "is not trusted (" in by["proxy"][0].text
    assert "SSL_CERT_FILE" in by["proxy"][0].text


async def test_a_persons_key_is_no_fault(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(people={"ann": str(tmp_path / "ann")})
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", (tmp_path / "ann").read_text().strip())
    by = await found(url=proxy.url)
    assert (grades(by, "proxy"), grades(by, "engines")) == (["ok"], ["note"])
    assert "the key of ann opens own sessions only" in by["engines"][0].text


async def test_stores_that_cannot_be_used_are_named() -> None:
    make_state_folder()
    default_store().write_text("not a database")
    assert grades(await found(), "store") == ["fault"]
    store = await open_store("sqlite:///good.db")
    await store.close()
    by = await found(store="sqlite:///good.db")
    assert by["store"][0].text.endswith("has no session yet")


async def test_keys_that_others_can_read_or_that_are_empty_are_named() -> None:
    key = make_state_folder() / "sessions.db.admin-key"
    key.write_text("secret")
    key.chmod(0o644)
    by = await found()
    assert by["admin key"][0].text.endswith(f"run: chmod 600 {key}")
    key.chmod(0o600)
    assert grades(await found(), "admin key") == ["ok"]
    key.write_text("\n")
    assert grades(await found(), "admin key") == ["fault"]


@needs_git
async def test_a_key_in_a_repository_is_named_before_it_is_committed(empty_folder: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=empty_folder, check=True, capture_output=True)

    git("init", "-q")
    key = empty_folder / "own.db.admin-key"
    key.write_text("secret")
    key.chmod(0o600)
    store = "sqlite:///own.db"
    assert grades(await found(store=store), "admin key") == ["ok", "note"]
    git("add", key.name)
    by = await found(store=store)
    assert grades(by, "admin key") == ["ok", "fault"]
    git("rm", "-q", "--cached", key.name)
    (empty_folder / ".gitignore").write_text("*.admin-key\n")
    assert grades(await found(store=store), "admin key") == ["ok"]


async def test_configurations_and_models_that_cannot_be_used_are_named(
    empty_folder: Path,
) -> None:
    (empty_folder / "wrong.yaml").write_text("prot: 8000\n")
    by = await found(config=Path("wrong.yaml"))
    assert grades(by, "configuration") == ["fault"]
    assert "store" not in by
    (empty_folder / "model").mkdir()
    by = await found(model=empty_folder / "model")
    assert "has no config.json" in by["model"][0].text
