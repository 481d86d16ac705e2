"""A proxy in the test's event loop, with real HTTP between client, proxy and scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from proxy.app import STORE, build_app
from proxy.client import ProxyClient, SessionHandle
from proxy.config import ProxyConfig, RenderingConfig, load_config
from proxy.http.server import app_runner
from proxy.records import Session, SessionKind, Turn
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store.protocol import Store
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.proxy.checkpoint import write_checkpoint

ADMIN_KEY = "admin-key-of-the-tests"
Answer = Callable[[str], str]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def rendering(checkpoint: Path) -> Rendering:
    return Rendering(load_tokenizer(checkpoint), RenderingConfig())


@dataclass(slots=True)
class RunningProxy:
    """A listening proxy, its engine, and methods to call it."""

    url: str
    engine: ScriptedEngine
    control: ProxyClient
    http: aiohttp.ClientSession
    rendering: Rendering

    async def session(self, kind: SessionKind = SessionKind.TRAIN, **more: Any) -> SessionHandle:
        return await self.control.create_session(kind=kind, **more)

    def answers(self, answer: Answer | str) -> None:
        """Sets the text of the engine's answers."""
        tokenizer = self.rendering.tokenizer
        self.engine.script = text_script(
            answer if callable(answer) else lambda _: answer,
            decode=tokenizer.decode,
            encode=tokenizer.encode,
            end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
        )

    async def post(
        self,
        session: SessionHandle,
        route: str,
        body: Any,
        timeout_s: float = 300,
        /,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and JSON of a call that is not streamed."""
        headers = {"Authorization": f"Bearer {session.api_key}", **headers}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        url = f"{session.base_url}/{route}"
        timeout = aiohttp.ClientTimeout(timeout_s)
        async with self.http.post(url, data=data, headers=headers, timeout=timeout) as response:
            return response.status, orjson.loads(await response.read())

    async def events(self, session: SessionHandle, route: str, body: Any) -> list[bytes]:
        """All events of a streamed call."""
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/{route}"
        async with self.http.post(url, data=orjson.dumps(body), headers=headers) as response:
            assert response.status == 200, await response.text()
            data = await response.read()
        return [event for event in data.split(b"\n\n") if event]

    async def record(self, session: SessionHandle) -> tuple[Session, list[Turn]]:
        return await self.control.get_turns(session.trial_id)


StartProxy = Callable[..., Awaitable[RunningProxy]]


@asynccontextmanager
async def starting_proxies(
    checkpoint: Path, rendering: Rendering, folder: Path
) -> AsyncIterator[StartProxy]:
    """Starts proxies, which end with the context; `folder` holds their store."""
    async with AsyncExitStack() as stack:

        async def start(
            *, engine: ScriptedEngine | None = None, store: Store | str | None = None, **config: Any
        ) -> RunningProxy:
            """`store`: a URL, or an open store."""
            if engine is None:
                engine = await stack.enter_async_context(ScriptedEngine(lambda _: []))
            url = store if isinstance(store, str) else f"sqlite:///{folder}/proxy.db"
            given = {"store": url, "admin_key": ADMIN_KEY, **config}
            settings: ProxyConfig = load_config(
                None, model=checkpoint, engines=[{"url": engine.url}], **given
            )
            app = build_app(settings, store=None if isinstance(store, str) else store)
            runner = app_runner(app, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await app[STORE].announce(url)
            control = await stack.enter_async_context(ProxyClient(url, ADMIN_KEY))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            proxy = RunningProxy(url, engine, control, http, rendering)
            proxy.answers("Hello.")
            return proxy

        yield start


@pytest.fixture
async def start_proxy(
    checkpoint: Path, rendering: Rendering, tmp_path: Path
) -> AsyncIterator[StartProxy]:
    """Starts proxies with the configuration that the test gives."""
    async with starting_proxies(checkpoint, rendering, tmp_path) as start:
        yield start


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> RunningProxy:
    return await start_proxy()
