"""The stream of the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from aiohttp import ClientResponse, ClientSession, web
from aiohttp.test_utils import TestServer

from proxy.client import ProxyClient
from proxy.extras.view import live
from proxy.extras.view.answers import StateJson
from proxy.extras.view.live import LiveFeed
from proxy.person_keys import EVERYTHING
from proxy.records import Session, SessionKind, SessionStatus
from proxy.store import open_store
from proxy.store.browser import Position
from tests.proxy.conftest import StartProxy
from tests.proxy.extras.view.recording import call, user


async def allowed() -> bool:
    return True


@asynccontextmanager
async def reading(
    feed: LiveFeed, may_read: Callable[[], Awaitable[bool]]
) -> AsyncIterator[ClientResponse]:
    async def follow(request: web.Request) -> web.StreamResponse:
        return await feed.stream(request, EVERYTHING, may_read)

    app = web.Application()
    app.router.add_get("/", follow)
    async with (
        TestServer(app) as server,
        ClientSession() as http,
        http.get(server.make_url("/")) as response,
    ):
        yield response


async def test_text_that_is_not_utf_8_does_not_end_the_stream(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path / 'store.db'}")
    state: dict[str, Any] = {"runs": [{"name": "\ud800", "step": 10**30}]}
    feed = LiveFeed(lambda: store.browser, lambda _: cast("StateJson", state))

    try:
        async with reading(feed, allowed) as response:
            sent = b""
            async with asyncio.timeout(60):
                while b"event: state\n" not in sent:
                    sent = await response.content.readuntil(b"\n\n")
            feed.close()
        assert orjson.loads(sent.partition(b"data: ")[2]) == {"runs": [{"name": "?", "step": 1e30}]}
    finally:
        await store.close()


async def test_reader_whose_key_is_revoked_is_cut_off_while_there_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEEP_ALIVE_POLLS", 2)
    monkeypatch.setattr(live, "POLL_S", 0.001)
    store = await open_store(f"sqlite:///{tmp_path / 'store.db'}")
    await store.create_session(Session("t", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0))
    feed = LiveFeed(lambda: store.browser, lambda _: cast("StateJson", {}))

    async def revoked() -> bool:
        return False

    try:
        async with reading(feed, revoked) as response:
            sent = 0
            while sent < 20 and await response.content.readuntil(b"\n\n"):
                sent += 1
                await store.add_event("t", "noted", {})
            feed.close()
        assert sent < 20
    finally:
        await store.close()


async def test_a_program_that_watches_ends_with_the_stream(tmp_path: Path) -> None:
    """The last news have a position, too, from which it goes on with the next proxy."""
    store = await open_store(f"sqlite:///{tmp_path / 'store.db'}")
    feed = LiveFeed(lambda: store.browser, lambda _: cast("StateJson", {}))

    async def follow(request: web.Request) -> web.StreamResponse:
        return await feed.stream(request, EVERYTHING, allowed)

    app = web.Application()
    app.router.add_get("/view/live", follow)
    seen = []
    try:
        async with (
            asyncio.timeout(60),
            TestServer(app) as server,
            ProxyClient(str(server.make_url("")), "key") as client,
        ):
            async for happening in client.watch():
                seen.append(happening)
                if happening.state is not None:
                    feed.close()
    finally:
        await store.close()
    assert [each.state is None for each in seen] == [True, False, True, False]
    assert all(each.position for each in seen)


async def test_reader_misses_nothing_after_the_newest_session_is_deleted(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/a.db")
    proxy = await start_proxy(store=store)
    for name in ("first", "newest"):
        session = await proxy.session(trial_id=name)
        for number in range(3):
            await call(proxy, session, [user(f"{name} {number}")])
    seen = (await store.browser.recent(Position(), 100)).position
    await proxy.control.delete("newest")
    session = await proxy.session(trial_id="next")
    await call(proxy, session, [user("Go on.")])
    news = await store.browser.recent(seen, 100)
    assert [head.session_id for head in news.begun] == ["next"]
    assert [head.session_id for head in news.answered] == ["next"]
    other = await open_store(f"sqlite:///{tmp_path}/b.db")
    assert (await other.browser.recent(news.position, 100)).position == Position()
    await other.close()
    await store.close()
