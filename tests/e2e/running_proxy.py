"""A proxy of its own in front of a running vLLM, and conversations through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from proxy.app import build_app
from proxy.client import ProxyClient
from proxy.config import load_config
from proxy.http.server import app_runner
from proxy.records import SessionKind, Turn
from tests.proxy.conftest import ADMIN_KEY


@dataclass(frozen=True, slots=True)
class Running:
    control: ProxyClient
    http: aiohttp.ClientSession

    async def talk(
        self,
        sampling: dict[str, float],
        *,
        turns: int,
        tokens: int = 24,
        kind: SessionKind = SessionKind.TRAIN,
        **more: Any,
    ) -> list[Turn]:
        """The record of a conversation that was sampled with these parameters; `more`: fields of
        each request."""
        session = await self.control.create_session(sampling=sampling, kind=kind)
        messages = [{"role": "user", "content": "Say something."}]
        for _ in range(turns):
            body = {"messages": messages, "max_tokens": tokens, **more}
            headers = {"Authorization": f"Bearer {session.api_key}"}
            target = f"{session.base_url}/chat/completions"
            async with self.http.post(target, json=body, headers=headers) as response:
                reply = await response.json()
                assert response.status == 200, reply
            answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
            messages += [answer, {"role": "user", "content": "Go on."}]
        return (await self.control.get_turns(session.trial_id))[1]


@asynccontextmanager
async def running_proxy(model: Path, engine_url: str, folder: Path) -> AsyncIterator[Running]:
    """A proxy that keeps its store in `folder`."""
    config = load_config(
        model=model,
        engines=[{"url": engine_url}],
        store=f"sqlite:///{folder}/proxy.db",
        admin_key=ADMIN_KEY,
    )
    runner = app_runner(build_app(config), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ProxyClient(url, ADMIN_KEY) as control, aiohttp.ClientSession() as http:
        yield Running(control, http)
    await runner.cleanup()
