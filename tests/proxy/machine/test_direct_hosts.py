"""Company proxies: what goes through them, and what reaches its host directly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import aiohttp
import httpx
import pytest
import requests.utils
import websockets.proxy
import websockets.uri
from yarl import URL

import harbor_sdk.direct_hosts
from proxy.errors import ConfigurationError
from proxy.machine.direct_hosts import is_direct, proxy_for, reach_directly, with_direct_hosts
from tests.company_network import DEAD, PROXY_NAMES

OWN = (
    "http://127.0.0.1:8000/t/v1",
    "http://localhost:8000",
    "http://[::1]:8000",
    "http://10.0.0.7:8000/v1",
    "http://trainer.corp.example:8000/v1",
    "http://gpu-7:8001",
    "https://gpu-7:8001",
    "https://10.0.0.7",
    "https://[fd00::7]:8000",
    "wss://192.168.3.4",
)
FOREIGN = ("https://huggingface.co/x", "https://api.example.com/v1", "wss://proxy.example.org")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in PROXY_NAMES:
        monkeypatch.setenv(name, DEAD)


@pytest.mark.parametrize("url", OWN)
@pytest.mark.usefixtures("dead_proxy")
def test_own_hosts_are_direct(url: str) -> None:
    assert is_direct(url)
    assert proxy_for(url) is None


@pytest.mark.parametrize("url", FOREIGN)
@pytest.mark.usefixtures("dead_proxy")
def test_the_rest_goes_through_the_proxy(url: str) -> None:
    assert not is_direct(url)
    assert proxy_for(url) == DEAD


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
def test_each_spelling_of_the_proxy_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in PROXY_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert proxy_for(FOREIGN[0]) is None
    monkeypatch.setenv(name, "proxy.corp:3128")
    assert proxy_for(FOREIGN[0]) == "http://proxy.corp:3128"
    monkeypatch.setenv("no_proxy", ".huggingface.co")
    assert proxy_for(FOREIGN[0]) is None
    assert proxy_for(FOREIGN[1]) is not None


def test_other_kinds_of_proxies_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@proxy.corp:1080")
    with pytest.raises(ConfigurationError, match=r"ALL_PROXY: 'proxy.corp:1080' is not an http"):
        proxy_for(FOREIGN[0])
    assert proxy_for(OWN[0]) is None
    with pytest.raises(ConfigurationError) as caught:
        proxy_for(FOREIGN[0])
    assert "secret" not in str(caught.value)


def goes_through_a_proxy(url: str) -> dict[str, bool]:
    """By the name of a client: whether it takes the environment's proxy for `url`."""
    parts = urlsplit(url)
    with httpx.Client() as http:
        direct = http._transport_for_url(httpx.URL(url)) is http._transport
    socket = websockets.uri.parse_uri(url.replace("http", "ws", 1))
    return {
        "urllib": not proxy_bypass(parts.hostname or ""),
        "requests": not requests.utils.should_bypass_proxies(url, None),
        "httpx": not direct,
        "websockets": websockets.proxy.get_proxy(socket) is not None,
        "aiohttp": asyncio.run(_aiohttp_proxies(url)),
    }


async def _aiohttp_proxies(url: str) -> bool:
    try:
        aiohttp.helpers.get_env_proxy_for_url(URL(url))
    except LookupError:
        return False
    return True


@pytest.mark.parametrize("given", [None, ".corp", "10.0.0.0/8, .corp", "localhost"])
@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
@pytest.mark.usefixtures("dead_proxy")
def test_clients_of_agents_reach_the_run_and_nothing_else_directly(
    name: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv(name, given)
    reach_directly("http://trainer.example.net:8000/v1", "http://[fd00::7]:8000")
    for url in (*OWN[:3], "http://trainer.example.net:9", "http://[fd00::7]:8001"):
        assert not any(goes_through_a_proxy(url).values()), url
    for url in ("https://huggingface.co", "http://archive.example.org", "http://10.1.2.3"):
        through = goes_through_a_proxy(url)
        if given and "10.0.0.0/8" in given and "10.1" in url:
            assert not through["requests"]  # it alone knows ranges
        else:
            assert all(through.values()), url
    if given is not None:
        for spelling in ("NO_PROXY", "no_proxy"):
            assert os.environ[spelling].startswith(given.replace(", ", ","))


def test_each_spelling_keeps_what_it_had() -> None:
    env = {"http_proxy": DEAD, "NO_PROXY": "a.corp", "no_proxy": "b.corp,127.0.0.1"}
    assert with_direct_hosts(env, "http://h:1") == {
        "http_proxy": DEAD,
        "NO_PROXY": "a.corp,localhost,127.0.0.1,::1,h",
        "no_proxy": "b.corp,127.0.0.1,localhost,::1,h",
    }


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin", "NO_PROXY": ".corp"},
        {"HTTP_PROXY": ""},
        {"HTTP_PROXY": DEAD, "NO_PROXY": "*", "no_proxy": "*"},
    ],
)
def test_environments_that_need_nothing_are_unchanged(env: dict[str, str]) -> None:
    assert with_direct_hosts(env, "http://h:1") == env


def test_a_host_behind_the_proxy_is_not_exempted() -> None:
    env = with_direct_hosts({"ALL_PROXY": DEAD}, "https://proxy.example.org/t/v1")
    assert env["no_proxy"] == env["NO_PROXY"] == "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"HTTP_PROXY": DEAD, "NO_PROXY": "a , b"},
        {"all_proxy": DEAD, "no_proxy": "*"},
        {"https_proxy": DEAD, "NO_PROXY": "a", "no_proxy": "b"},
    ],
)
def test_harbor_sdk_has_the_same_rules(env: Mapping[str, str]) -> None:
    urls = [url for url in (*OWN, *FOREIGN) if url.startswith("http")]
    theirs = harbor_sdk.direct_hosts
    assert theirs.with_direct_hosts(env, *urls) == with_direct_hosts(env, *urls)
    assert [*map(theirs.is_direct, urls)] == [*map(is_direct, urls)]
