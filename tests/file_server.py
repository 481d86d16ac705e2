"""Serves a folder by HTTP, and can hold the answer for a file back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


class FileServer:
    """Example: `async with serving_files(folder, "127.0.0.1") as server: server.url`"""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.asked = asyncio.Event()
        """Set when the file that is held back has been requested."""
        self.left = asyncio.Event()
        """Set when the client of that request has left."""
        self._folder = folder
        self._held: Path | None = None
        self._released = asyncio.Event()

    def hold(self, file: Path) -> None:
        """Requests of this file get no content until `release`."""
        self._held = file
        self.asked.clear()
        self.left.clear()
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        file = self._folder / request.match_info["path"]
        if not file.is_file():
            raise web.HTTPNotFound
        if file == self._held and request.method == "GET":
            self.asked.set()
            try:
                await self._released.wait()
            except asyncio.CancelledError:
                self.left.set()
                raise
        return web.FileResponse(file)


@asynccontextmanager
async def serving_files(folder: Path, host: str) -> AsyncIterator[FileServer]:
    server = FileServer(folder)
    app = web.Application()
    app.router.add_get("/{path:.+}", server.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        server.url = f"http://{host}:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
