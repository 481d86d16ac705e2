"""Takes a picture of each view: python -m tests.proxy.extras.view.screenshots FOLDER

The pictures of docs/view.md, for FOLDER = docs/images.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

from proxy.app import STORE, build_app
from proxy.client import ProxyClient
from proxy.config import RenderingConfig, load_config
from proxy.http.server import app_runner
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.extras.view.chromium import chromium
from tests.proxy.extras.view.conftest import enter
from tests.proxy.extras.view.pictures import take_all
from tests.proxy.extras.view.recording import record, record_day, record_many

NAME = "fix%2Fsum-1"
VIEWS = {
    "now": ("/now", "document.querySelectorAll('.view-now tbody tr').length > 3"),
    "sessions": ("/sessions", "document.querySelectorAll('.sessions tbody tr').length > 3"),
    "trial": (f"/trial/{NAME}?turn=3", "document.querySelectorAll('.message').length > 6"),
    "day": ("/trial/day", "document.querySelector('.curation .comment')"),
    "fork": (f"/trial/{NAME}?turn=4", "document.querySelector('.diff del')"),
    "tokens": (f"/tokens/{NAME}?turn=3", "document.querySelectorAll('.flow .token').length > 9"),
    "table": (f"/tokens/{NAME}?turn=3&as=table", "document.querySelector('.token-table .p')"),
    "search": ("/search?text=numbers", "document.querySelectorAll('.hits mark').length > 3"),
    "forks": ("/forks", "document.querySelector('.view-forks tbody tr')"),
}


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        model = write_checkpoint(temporary / "model")
        store = f"sqlite:///{temporary}/s.db"
        async with ScriptedEngine(lambda _: []) as engine:
            config = load_config(
                None, model=model, engines=[{"url": engine.url}], store=store, admin_key=ADMIN_KEY
            )
            app = build_app(config)
            runner = app_runner(app, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await app[STORE].announce(url)
            rendering = Rendering(load_tokenizer(model), RenderingConfig())
            async with ProxyClient(url, ADMIN_KEY) as control, aiohttp.ClientSession() as http:
                proxy = RunningProxy(url, engine, control, http, rendering)
                await record(proxy)
                await record_many(proxy, 12)
                await record_day(proxy)
                async with chromium(temporary / "profile") as browser:
                    tab = await browser.tab()
                    await enter(tab, proxy)
                    await take_all(tab, VIEWS, folder)
            await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
