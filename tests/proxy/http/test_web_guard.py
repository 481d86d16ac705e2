"""Requests that a web page could send through a browser are refused; those of clients pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.http.web_guard import Hosts, web_guard
from tests.proxy.conftest import RunningProxy, StartProxy

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "expected"),
    [
        ("127.0.0.1", [], "127.0.0.1:8000", True),
        ("127.0.0.1", [], "localhost:8000", True),
        ("127.0.0.1", [], "LOCALHOST.:8000", True),
        ("127.0.0.1", [], "[::1]:8000", True),
        ("127.0.0.1", [], "127.0.0.2", True),
        ("127.0.0.1", [], "evil.test", False),
        ("127.0.0.1", [], "localhost.evil.test", False),
        ("127.0.0.1", [], "127.0.0.1.evil.test:8000", False),
        ("127.0.0.1", [], "0.0.0.0:8000", False),
        ("127.0.0.1", [], "10.0.0.5:8000", False),
        ("127.0.0.1", [], "", False),
        ("10.0.0.5", [], "10.0.0.5:8000", True),
        ("10.0.0.5", [], "10.0.0.6:8000", False),
        ("0.0.0.0", [], "10.0.0.5:8000", True),
        ("0.0.0.0", [], "localhost", True),
        ("::", [], "[fe80::1]:8000", True),
        ("0.0.0.0", [], "evil.test:8000", False),
        ("0.0.0.0", ["proxy"], "proxy:8000", True),
        ("0.0.0.0", ["*.cluster.local"], "proxy.agentic.svc.cluster.local", True),
        ("0.0.0.0", ["*.cluster.local"], "cluster.local.evil.test", False),
        ("0.0.0.0", ["*"], "anything.test", True),
    ],
)
def test_host_must_be_the_bound_address_or_an_allowed_name(
    bound: str, allowed: list[str], host: str, expected: bool
) -> None:
    assert Hosts(bound, allowed).includes(host) is expected


@pytest.fixture
async def guarded() -> AsyncIterator[TestServer]:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"body": len(await request.read())})

    app = web.Application(middlewares=[web_guard(Hosts("127.0.0.1"))])
    app.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(app)
    async with server:
        yield server


async def status(
    server: TestServer,
    method: str,
    path: str = "/sessions",
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, server.make_url(path), headers=headers, data=data) as response,
    ):
        body = await response.json()
        assert response.status == 200 or set(body["error"]) == {"code", "message"}
        return response.status


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_foreign_host_is_refused_for_every_method(guarded: TestServer, method: str) -> None:
    assert await status(guarded, method, headers={"Host": "evil.test"}) == 403
    assert await status(guarded, method, headers={**JSON}) == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_have_any_host_but_no_foreign_origin(
    guarded: TestServer, path: str
) -> None:
    assert await status(guarded, "GET", path, {"Host": "10.1.2.3:8000"}) == 200
    assert await status(guarded, "GET", path, {"Origin": "http://evil.test"}) == 403


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://evil.test", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("chrome-extension://abc", 403),
        ("http://[", 403),
        ("http://{own}", 200),
        ("https://{own}", 200),
    ],
)
async def test_only_the_servers_own_origin_is_accepted(
    guarded: TestServer, origin: str, expected: int
) -> None:
    own = f"{guarded.host}:{guarded.port}"
    headers = {"Origin": origin.replace("{own}", own)}
    assert await status(guarded, "GET", headers=headers) == expected


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("cross-site", 403),
        ("same-site", 403),
        ("Cross-Site", 403),
        ("same-origin", 200),
        ("none", 200),
    ],
)
async def test_cross_site_fetches_are_refused(
    guarded: TestServer, site: str, expected: int
) -> None:
    assert await status(guarded, "GET", headers={"Sec-Fetch-Site": site}) == expected


@pytest.mark.parametrize(
    ("content_type", "data", "expected"),
    [
        ("text/plain", b"{}", 415),
        ("application/x-www-form-urlencoded", b"a=1", 415),
        ("multipart/form-data; boundary=x", b"--x--", 415),
        ("application/json-patch+json", b"[]", 415),
        ("text/plain", None, 415),
        ("application/json; charset=utf-8", b"{}", 200),
        ("application/octet-stream", None, 200),
    ],
)
async def test_requests_that_change_state_must_be_json(
    guarded: TestServer, content_type: str, data: bytes | None, expected: int
) -> None:
    headers = {"Content-Type": content_type}
    assert await status(guarded, "POST", headers=headers, data=data) == expected


async def raw(server: TestServer | RunningProxy, head: bytes) -> int:
    """The response status for a raw request that no client library would send."""
    port = server.port if isinstance(server, TestServer) else int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.replace(b"\n", b"\r\n") + b"Connection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"Authorization: Bearer \xff", 401),
        (b"x-api-key: \xff\xfe", 401),
        (b"X-Episode-Key: \xff", 401),
        (b"X-Other: \xff", 400),
        ("Authorization: Bearer Ωmega".encode(), 200),
    ],
)
async def test_headers_that_are_not_utf_8_are_refused(
    guarded: TestServer, header: bytes, expected: int
) -> None:
    head = b"GET /sessions HTTP/1.1\nHost: localhost\n" + header + b"\n"
    assert await raw(guarded, head) == expected


async def test_a_path_that_is_not_utf_8_is_refused(guarded: TestServer) -> None:
    head = b"GET /v1/caf\xe9 HTTP/1.1\nHost: localhost\n"
    assert await raw(guarded, head) == 400


async def test_a_request_without_host_or_with_two_is_refused(guarded: TestServer) -> None:
    assert await raw(guarded, b"GET /sessions HTTP/1.0\n") in (400, 403)
    two = b"GET /sessions HTTP/1.1\nHost: localhost\nHost: evil.test\n"
    assert await raw(guarded, two) in (400, 403)


FOREIGN = [
    {"Host": "evil.test"},
    {"Origin": "http://evil.test"},
    {"Sec-Fetch-Site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/engines"),
        ("POST", "/sessions"),
        ("POST", "/engines/pause"),
        ("GET", "/sessions"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/any-trial/v1/messages"),
        ("GET", "/metrics"),
    ],
)
async def test_both_planes_of_the_proxy_refuse_foreign_pages(
    proxy: RunningProxy, method: str, path: str, headers: dict[str, str]
) -> None:
    sent = {**headers, **JSON}
    body = b"{}" if method == "POST" else None
    async with proxy.http.request(method, proxy.url + path, headers=sent, data=body) as response:
        assert response.status == 403


async def test_host_of_the_proxys_allowed_hosts_is_accepted(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(allowed_hosts=["*.example.org"])
    for host, status in (("proxy.example.org", 401), ("proxy.example.com", 403)):
        async with proxy.http.get(f"{proxy.url}/v1/models", headers={"Host": host}) as response:
            assert response.status == status, host


async def test_engine_cannot_be_registered_by_a_form(proxy: RunningProxy) -> None:
    headers = {"Content-Type": "text/plain"}
    async with proxy.http.post(
        f"{proxy.url}/engines", data=b'{"url": "http://evil.test"}', headers=headers
    ) as response:
        assert response.status == 415


async def test_key_that_is_not_utf_8_gets_401_on_both_planes(proxy: RunningProxy) -> None:
    for path in (b"/sessions", b"/v1/models", b"/v1/chat/completions", b"/relay"):
        head = b"GET " + path + b" HTTP/1.1\nHost: localhost\nAuthorization: Bearer \xff\n"
        assert await raw(proxy, head) == 401
