"""What people see of a configuration contains no secret."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.extras.relay.worker_process import worker_config
from proxy.extras.view.run_folder import RecordedRun
from proxy.machine.secrecy import (
    flat_config,
    is_secret,
    without_credentials,
    without_password,
    without_secrets,
)

S = "hunter2"
SETTINGS: dict[str, Any] = {
    "engine": {"urls": [f"http://:{S}@gpu-0:8001"], "env": {"ANY": S}, "max_tokens": 64},
    "proxy_server": {"url": f"https://user:{S}@proxy"},
    "store": f"postgresql://db/sessions?user=u&password={S}",
    "hf_token": S,
    "auth_token": S,
    "auth_tokens": [S],
    "tokens": S,
    "services": [{"name": "search", "api_key": S}, {"nested": [{"apiKey": S}]}],
    "argv": ["serve", "--api-key", S, f"--token={S}", f"run --password {S}"],
    "shell": f"OPENAI_API_KEY={S} TOKEN='{S}' run",
    "note": f"Authorization: Bearer {S}",
    "pwd": S,
    "proxy": f"//user:{S}@host:3128",
    "json": f'{{"api_key": "{S}"}}',
    "yaml": f"api_key: {S}",
    "key_file": "/run/secrets/key",
    "logging": {"token_bytes": 5, "stop_token_ids": 7},
}


def test_configuration_in_the_view_of_a_run_has_no_secret(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    shown = RecordedRun(tmp_path).summary()["config"]
    assert S not in str(shown)
    assert shown["engine.urls"] == '["http://gpu-0:8001"]'
    assert shown["proxy_server.url"] == '"https://proxy"'
    assert shown["store"] == '"postgresql://db/sessions?user=u&password=hidden"'
    assert shown["engine.max_tokens"] == "64"
    assert shown["logging.token_bytes"] == "5"
    assert shown["key_file"] == '"/run/secrets/key"'
    assert S not in str(without_secrets(SETTINGS))
    assert S not in str(dict(flat_config(SETTINGS)))


@pytest.mark.parametrize(
    "text",
    [
        "hf://owner/name@main",
        "http://gpu:8001/v1",
        "a@b.c",
        "max_tokens: 5",
        "sqlite:////d/s.db",
        "a token: 5",
        "num_tokens=64, max_tokens: 12, prompt_tokens: 3.",
        "serve --max-tokens 64 --token-file /run/token",
        'key_file: /run/key token_file=/run/token {"max_tokens":5,"n":1}',
        "Unexpected token < in JSON; the tokens of an answer, and its keys",
        "KeyError: 'name' in authors.py:12, environment: test",
        "http://gpu:8001/v1?max_tokens=5&n=1",
    ],
)
def test_text_without_credentials_is_shown_as_it_is(text: str) -> None:
    assert without_credentials(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'curl -H "Authorization: Basic {S}" url', 'curl -H "Authorization: hidden" url'),
        (f"Authorization: {S} {S}\nnext", "Authorization: hidden\nnext"),
        (f'proxy-authorization: Digest a="{S}", b="{S}"', "proxy-authorization: hidden"),
        (f"[(b'authorization', 1)] {{b'cookie': b'a={S}'}}", None),
        (f"Cookie: a={S}; b={S}", "Cookie: hidden"),
        (f"AUTH={S} run", "AUTH=hidden run"),
        (f"AUTH=Basic {S} run", "AUTH=Basic hidden run"),
        (f"headers: Authorization: Token {S}", "headers: Authorization: hidden"),
        (f"headers={{'X': {{'Y': '{S}'}}, 'Z': '{S}'}}, n=1", "headers=hidden, n=1"),
        (f"api_keys: [a, {S}] n: 1", "api_keys: hidden n: 1"),
        (f"DB_DSN={S} --cookie {S} --env A={S}", "DB_DSN=hidden --cookie hidden --env hidden"),
        (f'{{"auth": "{S}", "n": 1}}', '{"auth": hidden, "n": 1}'),
        (f'{{"auth": "a\\"{S}", "n": 1}}', '{"auth": hidden, "n": 1}'),
        (f'"{{\\"api_key\\": \\"{S}\\"}}"', '"{\\"api_key\\": hidden}"'),
        (f"PASSWORD=ab&{S} run", "PASSWORD=hidden run"),
        (f"--password a#{S} run", "--password hidden run"),
        (f"PASSWORD='it'\"'\"'{S}' run", "PASSWORD=hidden run"),
        (f"PASSWORD=a'{S} run", "PASSWORD=hidden run"),
        (f"PASSWORD='a {S}", "PASSWORD=hidden"),
        ("password: 12345678", "password: hidden"),
        ("api_token: 12345678", "api_token: hidden"),
        (f"http://h?token=a;{S}&n=1#top", "http://h?token=hidden&n=1#top"),
        (f"@x http://a:b/{S}@host/v1@2", "@x http://2"),
        (f"token: bearer {S}", "token: bearer hidden"),
    ],
)
def test_value_of_a_named_secret_is_hidden_to_its_end(text: str, shown: str | None) -> None:
    assert S not in without_credentials(text)
    assert shown is None or without_credentials(text) == shown


def _hostile() -> Iterator[str]:
    """Texts that make an expression with nested or overlapping repetitions take minutes."""
    parts = ["http://a:", "//", "@", "key", "key=", "key: ", "-key ", "key='", 'key="', 'key=\\"']
    parts += ["key={", "key=[a{[", 'cookie:="', "cookie: ", "bearer ", "auth: basic ", "?key=&"]
    parts += ["max_tokens: 1", "tokens", "1", " ", "\n", "\\", "'", "a-", "a'", "token:9"]
    for part in parts:
        yield part * (200_000 // len(part))


def _too_long(_number: int, _frame: object) -> None:
    pytest.fail("the time is not linear")


def test_time_is_linear_for_hostile_texts() -> None:
    """They take 2 s of processor time together; one of them takes a minute if it is quadratic."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    try:
        for text in _hostile():
            without_credentials(text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_number_of_tokens_is_shown_and_a_token_that_is_a_number_is_not() -> None:
    assert not is_secret("max_tokens", 64)
    assert not is_secret("token_file", "/run/token")
    assert is_secret("token", 1234)
    assert is_secret("max_tokens", "sk-1")


def test_password_in_the_query_of_a_store_url_is_not_shown() -> None:
    shown = without_password(f"postgresql:///db?user=u&password={S}&sslmode=require")
    assert shown == "postgresql:///db?user=u&password=hidden&sslmode=require"
    assert S not in without_password(f"postgresql://u:{S}@db/x?sslpassword={S}")


@pytest.mark.parametrize(
    "text",
    [
        f"relay: {{token: {S}, token_file: /none}}",
        f"relay: {{tokn: {S}}}",
        f"admn_key: {S}",
        f"relay: [{S}]",
        f"relay: {{window: 'http://:{S}@x'}}",
        f"engines: [{{url: 'http://x', api_key: {S}, api_key_file: /none}}]",
        f"engines: [{{url: 'http://x', api_key: [{S}]}}]",
        f"engines: {{url: 'http://:{S}@x'}}",
        f"host: 0.0.0.0\nadmin_key: '{S}\nport: [",
    ],
)
def test_error_in_the_configuration_of_a_proxy_has_no_secret(tmp_path: Path, text: str) -> None:
    (tmp_path / "proxy.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_config(tmp_path / "proxy.yaml")
    assert S not in refused.value.message


@pytest.mark.parametrize("more", [{"engine_api_key": [S]}, {"engine_api_key_file": Path("/none")}])
def test_error_in_the_configuration_of_a_worker_has_no_secret(more: dict[str, Any]) -> None:
    given = {"proxy": "wss://p", "engine": "http://e", "model": Path("m"), "token": S}
    with pytest.raises(ConfigurationError, match=r"engine_api_key|ENGINE_API_KEY") as refused:
        worker_config(given | more)
    assert S not in refused.value.message


def test_file_of_a_secret_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"token_file: .*/token is not a text in UTF-8"):
        load_config(relay={"token_file": tmp_path / "token"})
