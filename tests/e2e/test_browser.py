"""A real browser opens a foreign page that attacks our servers; the guard refuses all its requests.

The page is opened twice: at another site, and at a name that was rebound to the server. In the
second case the browser considers page and server one origin. The page even has the server's key.
Each test also runs with the guards switched off: then the page's requests reach the servers, and
change them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from harbor_sdk.server import guard as harbor_guard
from proxy.http import web_guard
from tests.agent_loop.extras.swarm.conftest import TOKEN as SWARM_TOKEN
from tests.agent_loop.extras.swarm.conftest import StartSwarm, start_swarm  # noqa: F401
from tests.harbor_sdk.scripted_server import TOKEN as HARBOR_TOKEN
from tests.harbor_sdk.scripted_server import ScriptedTrials, serving
from tests.needs import needs
from tests.proxy.conftest import (  # noqa: F401
    ADMIN_KEY,
    StartProxy,
    checkpoint,
    proxy,
    rendering,
    start_proxy,
)
from tests.proxy.extras.view.chromium import ended_with_its_test

CHROMIUM = shutil.which("chromium")
pytestmark = needs(None if CHROMIUM else "chromium is not installed: apt-get install chromium")
NAME = "evil.test"
WAIT_S = 240.0
"""Much longer than needed, for a machine on which much else runs."""
PAGE = """<!doctype html><body><script>
const {target, key, posts, gets, report} = ATTACK;
const found = [], body = JSON.stringify(BODY);
const attempt = async (what, run) => {
  try { found.push([what, await run()]); } catch (error) { found.push([what, "refused"]); }
};
const send = async (path, options) => {
  const answer = await fetch(target + path, options);
  return answer.type === "opaque" ? "opaque" : answer.status;
};
const image = path => new Promise(resolve => {
  const element = new Image();
  element.onload = () => resolve("loaded");
  element.onerror = () => resolve("refused");
  element.src = target + path;
});
const form = (path, enctype) => new Promise(resolve => {
  const frame = document.createElement("iframe"), element = document.createElement("form");
  frame.name = "frame" + found.length;
  document.body.append(frame, element);
  Object.assign(element, {method: "POST", action: target + path, enctype, target: frame.name});
  const field = document.createElement("input");
  Object.assign(field, {name: body.slice(0, -1) + ',"x":"', value: '"}'});
  element.append(field);
  let loads = 0;
  frame.onload = () => { if (frame.src === "") resolve("sent"); };
  element.submit();
});
const socket = path => new Promise(resolve => {
  const opened = new WebSocket(target.replace("http", "ws") + path);
  opened.onopen = () => resolve("open");
  opened.onerror = () => resolve("refused");
});
(async () => {
  for (const path of posts) {
    const plain = {method: "POST", body, headers: {"Content-Type": "text/plain"}};
    const json = {method: "POST", body, headers: {
      "Content-Type": "application/json", "Authorization": "Bearer " + key}};
    await attempt("text " + path, () => send(path, plain));
    await attempt("no-cors " + path, () => send(path, {...plain, mode: "no-cors"}));
    await attempt("bare " + path, () => send(path, {method: "POST", mode: "no-cors"}));
    await attempt("json " + path, () => send(path, json));
    const parts = new FormData();
    parts.append("metadata", body);
    const multipart = {method: "POST", body: parts, headers: {"Authorization": "Bearer " + key}};
    await attempt("multipart " + path, () => send(path, multipart));
    await attempt("beacon " + path, () => String(navigator.sendBeacon(target + path, body)));
    await attempt("form " + path, () => form(path, "text/plain"));
  }
  for (const path of gets) {
    const headers = {"Authorization": "Bearer " + key};
    await attempt("get " + path, () => send(path, {headers}));
    await attempt("image " + path, () => image(path));
  }
  await attempt("socket", () => socket("/relay"));
  await fetch(report, {method: "POST", mode: "no-cors", body: JSON.stringify(found)});
  location.href = target + gets[0] + "?navigated";
})();
</script>"""


@dataclass(frozen=True)
class Target:
    url: str
    key: str
    posts: list[str]
    gets: list[str]
    body: dict[str, Any]
    unchanged: Callable[[], Awaitable[None]]
    """Raises AssertionError if a request took effect."""
    is_open: bool = False
    """Whether a request without a key can have an effect."""

    def page_can_change(self, page: str) -> bool:
        """Whether the page can change the target when the guard is off. A page at another site
        cannot send the key: for that, the browser asks the server first."""
        return bool(self.posts) and (page == "rebound" or self.is_open)


@dataclass(frozen=True)
class Parts:
    """What targets are made of."""

    folder: Path
    start_proxy: StartProxy
    start_swarm: StartSwarm


@asynccontextmanager
async def proxy_target(parts: Parts) -> AsyncIterator[Target]:
    running = await parts.start_proxy(sessions={"auto_create": True}, relay={"token": "a-token"})

    async def unchanged() -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with aiohttp.ClientSession(running.url, headers=headers) as http:
            async with http.get("/sessions") as response:
                assert (await response.json())["sessions"] == []
            async with http.get("/engines") as response:
                engines = (await response.json())["engines"]
        assert len(engines) == 1

    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "url": "http://e.test"}
    posts = ["/mine/v1/chat/completions", "/sessions", "/engines", "/engines/pause"]
    gets = ["/sessions", "/engines"]
    yield Target(running.url, ADMIN_KEY, posts, gets, body, unchanged, is_open=True)


@asynccontextmanager
async def relay_target(parts: Parts) -> AsyncIterator[Target]:
    running = await parts.start_proxy(relay={"token": "a-token"})

    async def unchanged() -> None:
        assert len(await running.control.engines()) == 1

    yield Target(running.url, "a-token", [], ["/relay"], {}, unchanged)


@asynccontextmanager
async def swarm_target(parts: Parts) -> AsyncIterator[Target]:
    running = await parts.start_swarm()
    before = (await running.client.status()).model_dump(exclude={"at"})

    async def unchanged() -> None:
        assert (await running.client.status()).model_dump(exclude={"at"}) == before

    posts, body = ["/v1/episodes", "/v1/stop"], {"task_id": "a", "timeout_s": 5}
    yield Target(running.url, SWARM_TOKEN, posts, ["/v1/config"], body, unchanged)


@asynccontextmanager
async def harbor_target(parts: Parts) -> AsyncIterator[Target]:
    trials = ScriptedTrials()
    async with serving(parts.folder, trials) as url:

        async def unchanged() -> None:
            assert trials.started == []

        body = {"agent": {"name": "oracle"}, "task_name": "org/hello"}
        runs = ["/api/v1/runs"]
        yield Target(url.rstrip("/"), HARBOR_TOKEN, runs, runs, body, unchanged)


TARGETS = {
    "proxy": proxy_target,
    "relay": relay_target,
    "swarm": swarm_target,
    "harbor-server": harbor_target,
}


class Tap:
    """A server that serves the page, and connects every other request to the target as it is: so
    does a name that was rebound. It records what the browser asks, and what the target answers up
    to the navigation: after it, the page is the target's own, whose icon the browser may load."""

    def __init__(self, target: Target, report_url: str) -> None:
        self._target = target
        self._report_url = report_url
        self.url = ""
        self.asked = bytearray()
        self.answered = bytearray()
        self.navigated = asyncio.Event()
        """Set when a navigation of the whole page has been answered."""
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def refusals(self) -> set[str]:
        """What the target's error bodies give as code."""
        return {code.decode() for code in re.findall(rb'"code": ?"(\w+)"', self.answered)}

    @property
    def statuses(self) -> set[int]:
        return {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", self.answered)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        await asyncio.wait({task})
        self._serving.discard(task)

    async def close(self) -> None:
        """Ends the connections that are still open."""
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with closed(writer):
            # The browser opens connections in advance, and leaves some of them.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                if path in ("/foreign", "/rebound"):
                    writer.write(self._page(path, head))
                    await writer.drain()
                else:
                    await self._connect(head, reader, writer)

    def _page(self, path: str, head: bytes) -> bytes:
        host = re.search(rb"Host: (\S+)", head)
        assert host is not None
        target = self.url if path == "/foreign" else f"http://{host[1].decode()}"
        of = self._target
        attack = {"target": target, "key": of.key, "posts": of.posts, "gets": of.gets}
        text = PAGE.replace("ATTACK", json.dumps(attack | {"report": self._report_url}))
        text = text.replace("BODY", json.dumps(of.body))
        fields = "Content-Type: text/html\r\nConnection: close\r\n"
        return f"HTTP/1.1 200 OK\r\n{fields}\r\n{text}".encode()

    async def _connect(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        url = urlsplit(self._target.url)
        answers, asks = await asyncio.open_connection(url.hostname, url.port)
        navigates = False

        async def ask() -> None:
            nonlocal navigates
            data = head
            while data:
                self.asked += data
                navigates = navigates or b"?navigated" in data
                asks.write(data)
                await asks.drain()
                data = await reader.read(1 << 16)
            asks.close()

        async def answer() -> None:
            while data := await answers.read(1 << 16):
                if not self.navigated.is_set():
                    self.answered += data
                writer.write(data)
                await writer.drain()
                if navigates:
                    self.navigated.set()
            writer.close()

        async with closed(asks):
            await asyncio.gather(ask(), answer(), return_exceptions=True)


@asynccontextmanager
async def closed(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Closes the connection at the end, and waits until it is closed."""
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def foreign_site(target: Target) -> AsyncIterator[tuple[Tap, asyncio.Queue[Any]]]:
    """A site with the page, and the reports of its visitors."""
    reports: asyncio.Queue[Any] = asyncio.Queue()

    async def report(request: web.Request) -> web.Response:
        reports.put_nowait(json.loads(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/report", report)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tap = Tap(target, f"http://127.0.0.1:{runner.addresses[0][1]}/report")
    server = await asyncio.start_server(tap.serve, "127.0.0.1", 0, limit=1 << 20)
    tap.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield tap, reports
    finally:
        server.close()
        await tap.close()
        await runner.cleanup()


async def visit(
    url: str, folder: Path, tap: Tap, reports: asyncio.Queue[Any]
) -> list[tuple[str, Any]]:
    """What the page reported before it went to the target."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        *ended_with_its_test(),
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *(f"--user-data-dir={folder}", "--remote-debugging-port=0"),
        *(f"--host-resolver-rules=MAP {NAME} 127.0.0.1", url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            found = [(what, result) for what, result in await reports.get()]
            await tap.navigated.wait()
            return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.terminate()
        await browser.wait()


@pytest.fixture(params=["guarded", "unguarded"])
def is_guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the guards of our servers are on."""
    if request.param == "guarded":
        return True
    for check in ("_check_host", "_check_browser", "_check_content_type"):
        monkeypatch.setattr(web_guard, check, lambda *_: None)
    monkeypatch.setattr(harbor_guard, "_refuse_foreign_pages", lambda _: None)
    monkeypatch.setattr(harbor_guard, "is_loopback", lambda _: False)
    return False


@pytest.mark.parametrize("page", ["foreign", "rebound"])
@pytest.mark.parametrize("name", TARGETS)
async def test_page_changes_and_reads_nothing_because_of_the_guard(
    name: str,
    page: str,
    is_guarded: bool,
    tmp_path: Path,
    start_proxy: StartProxy,  # noqa: F811
    start_swarm: StartSwarm,  # noqa: F811
) -> None:
    parts = Parts(tmp_path, start_proxy, start_swarm)
    async with TARGETS[name](parts) as target, foreign_site(target) as (tap, reports):
        port = urlsplit(tap.url).port
        found = await visit(f"http://{NAME}:{port}/{page}", tmp_path / page, tap, reports)
        assert len(found) == 7 * len(target.posts) + 2 * len(target.gets) + 1
        assert b"Upgrade: websocket" in tap.asked
        assert ("socket", "refused") in found
        if is_guarded:
            for what, result in found:
                assert result in ("refused", "opaque", "sent", "true", 403, 415), what
            assert tap.statuses <= {403, 415}
            assert tap.refusals <= {"foreign_host", "foreign_origin", "content_type", "forbidden"}
            await target.unchanged()
        else:
            assert not tap.statuses & {403, 415}
            if target.page_can_change(page):
                with pytest.raises(AssertionError):
                    await target.unchanged()
