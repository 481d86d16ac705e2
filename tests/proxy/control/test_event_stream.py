"""The event stream of a session does not depend on other processes that do not answer."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from proxy.control import event_stream
from proxy.control.event_stream import EventStream
from proxy.extras.several_processes.siblings import ProcessSiblings
from proxy.records import Session, SessionKind, SessionStatus
from proxy.serving.sessions import CLOSING, LiveSession
from proxy.settings.profiles import Profiles
from proxy.store.sqlite import SqliteStore


async def test_sibling_that_does_not_answer_delays_no_event_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "OPEN_S", 0.01, raising=False)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent.sock"))
    silent.listen()
    store = SqliteStore(tmp_path / "s.sqlite")
    session = Session("t", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0)
    await store.create_session(session)
    await store.add_event("t", "noted", {})
    live = LiveSession(session, Profiles({}).get("default"))
    siblings = ProcessSiblings([tmp_path / "silent.sock"])

    async def listen(request: web.Request) -> web.StreamResponse:
        return await EventStream(live, store, siblings, 30.0).answer(request, 0)

    app = web.Application()
    app.router.add_get("/", listen)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with (
        ClientSession() as http,
        http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as response,
        asyncio.timeout(5),
    ):
        assert b'"noted"' in await response.content.readline()
        live.closed.set()
        live.publish(CLOSING)
        await response.content.read()
    await runner.cleanup()
    silent.close()
    await store.close()
