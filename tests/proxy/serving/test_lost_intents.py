"""Calls that end between the record of their intent and their first token leave no open turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.records import Turn, TurnStatus
from proxy.serving.call import LiveCall
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.serving.test_retries import CHAT, MarkingStore, chat, statuses


class SlowStore(MarkingStore):
    """A store whose first write of an intent returns only when `gate` opens, or fails then."""

    def __init__(self, path: Path, fails: type[Exception] | None = None) -> None:
        super().__init__(path)
        self.fails = fails
        self.written = asyncio.Event()
        self.gate = asyncio.Event()

    async def begin_turn(self, turn: Turn, quota: str = "") -> None:
        await super().begin_turn(turn, quota)
        if not self.written.is_set():
            self.written.set()
            await self.gate.wait()
            if self.fails is not None:
                raise self.fails("after the intent was written")


async def assert_closed(proxy: RunningProxy, trial_id: str, store: SlowStore, path: Path) -> None:
    """The session can be used again, has no open turn, and is free for other processes."""
    session = await proxy.session()
    assert (await proxy.post(session, CHAT, chat("Another session.")))[0] == 200
    await store.marks.acquire()
    other = SqliteStore(path)
    _, turns = await proxy.control.get_turns(trial_id)
    assert TurnStatus.OPEN not in [turn.status for turn in turns]
    assert await other.holder(trial_id) is None
    await other.close()
    await store.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_disconnects_while_its_intent_is_written_leaves_no_open_turn(
    stream: bool, start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted, abort = asyncio.Event(), LiveCall.abort

    def observed(call: LiveCall, why: Exception) -> None:
        abort(call, why)  # type: ignore[arg-type]
        aborted.set()

    monkeypatch.setattr(LiveCall, "abort", observed)
    path = tmp_path / "slow.db"
    store = SlowStore(path)
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    call = asyncio.create_task(proxy.post(session, CHAT, chat(stream=stream)))
    async with asyncio.timeout(20):
        await store.written.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await aborted.wait()
        store.gate.set()
        assert (await proxy.post(session, CHAT, chat("The next.")))[0] == 200
        await store.marks.acquire()
    assert await statuses(proxy, session) == [TurnStatus.CUT, TurnStatus.DONE]
    await assert_closed(proxy, session.trial_id, store, path)


async def test_error_of_any_kind_after_the_intent_was_written_leaves_no_open_turn(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    path = tmp_path / "failing.db"
    store = SlowStore(path, fails=RecursionError)
    store.gate.set()
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/{CHAT}"
    async with proxy.http.post(url, json=chat(), headers=headers) as response:
        assert response.status == 500
    assert (await proxy.post(session, CHAT, chat("The next.")))[0] == 200
    await store.marks.acquire()
    assert await statuses(proxy, session) == [TurnStatus.CUT, TurnStatus.DONE]
    await assert_closed(proxy, session.trial_id, store, path)
