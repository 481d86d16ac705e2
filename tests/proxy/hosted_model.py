"""A hosted model: OpenAI's `/v1/chat/completions` with given answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class HostedModel:
    """Gives the answers in `says`, one per call; the last one again and again."""

    def __init__(self) -> None:
        self.says: list[tuple[dict[str, Any], str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers["Authorization"])
        message, reason = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        return web.json_response({"id": "c", "choices": [choice], "usage": {}})


@asynccontextmanager
async def hosted_model() -> AsyncIterator[HostedModel]:
    server, app = HostedModel(), web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()
