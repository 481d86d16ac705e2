"""Engines that only a company's HTTP proxy reaches, by TLS under a certificate of its own."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import ClientSession, web

from agent_loop.model_api import chat_completion
from proxy.engines.upstream import Upstream
from proxy.errors import EngineError
from proxy.machine.direct_hosts import proxy_for
from tests.company_network import DEAD, HOSTED, PROXY_NAMES, PrivateAuthority, company_proxy

URL = f"https://{HOSTED}"
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> PrivateAuthority:
    return PrivateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def trusted(authority: PrivateAuthority, monkeypatch: pytest.MonkeyPatch) -> PrivateAuthority:
    for name in (*PROXY_NAMES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    return authority


def answering() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        said = {"role": "assistant", "content": (await request.json())["messages"]}
        return web.json_response({"choices": [{"message": said}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app


async def posted(path: str, body: bytes) -> None:
    upstream = Upstream(URL)
    try:
        await upstream.post(path, body)
    finally:
        await upstream.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_calls_go_through_one_tunnel_each_connection(
    run: Run, trusted: PrivateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def calls() -> None:
        async with trusted.serving(answering()) as port, company_proxy(port) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("://", "://me:p%40ss@"))
            upstream = Upstream(URL)
            for word in ("one", "two" * 100_000):
                body = await upstream.post(
                    "/v1/chat/completions", b'{"messages":"%b"}' % word.encode()
                )
                assert word.encode() in body
            await upstream.close()
            (head,) = proxy.heads
            assert head.startswith(f"CONNECT {HOSTED}:443 HTTP/1.1\r\n".encode())
            assert base64.b64encode(b"me:p@ss") in head

    run(calls())


async def test_a_judge_behind_the_proxy_is_reached(
    trusted: PrivateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    # aiohttp makes its context when it is imported, here before SSL_CERT_FILE was set.
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context())
    async with trusted.serving(answering()) as port, company_proxy(port) as proxy:
        monkeypatch.setenv("all_proxy", proxy.url)
        async with ClientSession(proxy=proxy_for(URL)) as http:
            body = {"messages": "hello"}
            assert await chat_completion(http, f"{URL}/v1", {}, body, 10.0) == "hello"
        assert proxy.heads


async def test_a_proxy_that_refuses_or_is_dead_is_named(
    trusted: PrivateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with company_proxy(9) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        for proxy.status in (b"407 Proxy Authentication Required", b"503 no"):
            with pytest.raises(EngineError, match=rf"refused {HOSTED}:443: HTTP/1.1 407|503 no"):
                await posted("/x", b"")
    monkeypatch.setenv("HTTPS_PROXY", DEAD)
    with pytest.raises(EngineError, match=r"the proxy 127\.0\.0\.1:9 of HTTPS_PROXY or ALL_PROXY"):
        await posted("/x", b"")


async def test_an_unknown_certificate_is_refused(
    authority: PrivateAuthority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(PrivateAuthority(tmp_path).ca))
    async with authority.serving(answering()) as port, company_proxy(port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with pytest.raises(EngineError, match="certificate verify failed"):
            await posted("/v1/chat/completions", b"{}")
