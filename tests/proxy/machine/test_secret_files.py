"""Secrets that the configuration names as files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import cli
from proxy.config import ProxyConfig, load_config
from proxy.errors import ConfigurationError
from proxy.extras.relay.worker_process import worker_config
from proxy.machine.secrecy import with_password, without_password


def test_relay_token_and_engine_key_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("relay secret\n")
    (tmp_path / "key").write_text("engine secret\n")
    engine = {"url": "http://gpu-0:8001", "api_key_file": str(tmp_path / "key")}
    config = load_config(relay={"token_file": tmp_path / "token"}, engines=[engine])
    assert config.relay.token is not None
    assert config.relay.token.get_secret_value() == "relay secret"
    assert config.engines[0].api_key is not None
    assert config.engines[0].api_key.get_secret_value() == "engine secret"


def test_worker_token_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("relay secret\n")
    monkeypatch.delenv("AGENTIC_WORKER_TOKEN", raising=False)
    monkeypatch.setenv("AGENTIC_WORKER_TOKEN_FILE", str(tmp_path / "token"))
    address = {"proxy": "wss://proxy", "engine": "http://127.0.0.1:1", "model": tmp_path}
    assert worker_config(address).token.get_secret_value() == "relay secret"


def test_unusable_secret_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for file, said in (("none", "cannot be read: No such file"), ("empty", "is empty")):
        with pytest.raises(ConfigurationError, match=f"token_file: {tmp_path}/{file} {said}"):
            load_config(relay={"token_file": tmp_path / file})
        with pytest.raises(ConfigurationError, match=f"store_password_file: .*{said}"):
            assert load_config(store_password_file=tmp_path / file).store_url
    with pytest.raises(ConfigurationError, match="token and token_file are both set"):
        load_config(relay={"token": "secret", "token_file": tmp_path / "none"})


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1))
def test_any_password_can_be_part_of_a_store_url(password: str) -> None:
    url = with_password("postgresql://agentic@db:5432/sessions?sslmode=require", password)
    parts = urlsplit(url)
    assert unquote(parts.password or "") == password
    assert (parts.username, parts.hostname, parts.port) == ("agentic", "db", 5432)
    assert (parts.path, parts.query) == ("/sessions", "sslmode=require")
    assert without_password(url) == "postgresql://agentic@db:5432/sessions?sslmode=require"


@pytest.mark.parametrize("url", ["sqlite:////data/s.db", "s.db", "postgresql://db/sessions"])
def test_store_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert without_password(url) == url


def test_store_password_is_taken_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@ss/w:rd%\n")
    config = load_config(
        store="postgresql://agentic@db/sessions", store_password_file=tmp_path / "password"
    )
    assert config.store_url == "postgresql://agentic:p%40ss%2Fw%3Ard%25@db/sessions"
    assert "p%40ss" not in repr(config)


def test_store_password_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config = ProxyConfig(store="postgresql://agentic:secret@db/sessions")
    cli._announce(None, config, "http://127.0.0.1:8000", [])
    assert "store postgresql://agentic@db/sessions" in capsys.readouterr().out
