"""Several blocks of a published file are requested at a time, where its server knows ranges."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.extras.relay.weights import published_files
from proxy.extras.relay.weights.publication import File
from proxy.extras.relay.weights.published_files import READ_AHEAD, PublishedFiles, PullStopped

BLOCK = 1000
CONTENT = bytes(each % 251 for each in range(9 * BLOCK + 7))
ABOUT = File("full", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@asynccontextmanager
async def serving(answer: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/full", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def pulled(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(published_files, "BLOCK_BYTES", BLOCK)
    files = PublishedFiles(url, folder)

    def pull() -> bytes:
        with files.pulling("run/v1", lambda: False), (folder / "copy").open("w+b") as copy:
            files.fetch(ABOUT.name, ABOUT, copy)
        return (folder / "copy").read_bytes()

    async with asyncio.timeout(60):
        return await asyncio.to_thread(pull)


def part_of(request: web.Request) -> bytes:
    asked = request.http_range
    return CONTENT[asked.start : asked.stop]


async def test_blocks_are_requested_before_the_ones_before_them_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, all_wait = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal waiting
        if request.http_range.start:
            waiting += 1
            if waiting == READ_AHEAD:
                all_wait.set()
            await all_wait.wait()  # for ever, if one block is requested at a time
        return web.Response(body=part_of(request), status=206)

    async with serving(answer) as url:
        assert await pulled(url, tmp_path, monkeypatch) == CONTENT


async def test_server_that_knows_no_ranges_is_asked_for_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += request.method == "GET"
        return web.Response(body=CONTENT)

    async with serving(answer) as url:
        assert await pulled(url, tmp_path, monkeypatch) == CONTENT
    assert asked <= READ_AHEAD + 2  # the first blocks, and the whole


async def test_pull_that_is_stopped_requests_no_further_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_files, "BLOCK_BYTES", BLOCK)
    starts = []

    async def answer(request: web.Request) -> web.Response:
        starts.append(request.http_range.start)
        return web.Response(body=part_of(request), status=206)

    async with serving(answer) as url:
        files = PublishedFiles(url, tmp_path)

        def pull() -> None:
            with files.pulling("run/v1", lambda: True), (tmp_path / "copy").open("w+b") as copy:
                files.fetch(ABOUT.name, ABOUT, copy)

        with pytest.raises(PullStopped):
            await asyncio.to_thread(pull)
    assert len(starts) < len(CONTENT) // BLOCK
