"""A minimal Python proxy: aiohttp on both sides, and the bytes are passed on without parsing."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _serve(upstream: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with http.post(upstream + request.path, data=body, headers=headers) as answer:
                if answer.content_type == "text/event-stream":
                    return await _stream(request, answer)
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type="application/json"
                )

        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


async def _stream(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    async for part in answer.content.iter_any():
        await response.write(part)
    await response.write_eof()
    return response


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
