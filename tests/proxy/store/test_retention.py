"""Sessions that ended long ago are removed, and the database shrinks."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from proxy.records import Reward, SessionStatus
from proxy.store.protocol import SessionFilter, Store
from proxy.store.retention import remove_old_sessions, shrink_store
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import StartProxy
from tests.proxy.store.conftest import opener, store
from tests.proxy.store.test_conformance import a_session, an_intent, answered

__all__ = ["opener", "store"]
DAY_S = 86_400.0
NOW = 1e9


async def add(store: Store, name: str, *, completed_at: float | None, expires_at: float) -> None:
    await store.create_session(a_session(name, expires_at=expires_at))
    turn = replace(an_intent(name), prompt_ids=np.arange(50_000, dtype=np.int32))
    await store.begin_turn(turn)
    await store.commit_turn(answered(turn))
    await store.add_reward(name, Reward(key="verifier", value=1.0))
    await store.add_event(name, "noted", {})
    if completed_at is not None:
        await store.set_status(name, SessionStatus.COMPLETED, at=completed_at)


async def test_only_sessions_that_ended_long_ago_are_removed(store: Store) -> None:
    later = NOW + DAY_S
    await add(store, "completed-long-ago", completed_at=NOW - 2 * DAY_S, expires_at=later)
    await add(store, "completed-today", completed_at=NOW - 1, expires_at=later)
    await add(store, "expired-long-ago", completed_at=None, expires_at=NOW - 2 * DAY_S)
    await add(store, "expired-today", completed_at=None, expires_at=NOW - 1)
    await add(store, "open", completed_at=None, expires_at=later)
    assert await remove_old_sessions(store, DAY_S, now=NOW) == 2
    left = [session.session_id for session in await store.list_sessions(SessionFilter())]
    assert left == ["completed-today", "expired-today", "open"]
    assert await store.get_turns("completed-long-ago") == []
    assert await store.get_events("expired-long-ago") == []
    assert len(await store.get_turns("completed-today")) == 1
    assert await remove_old_sessions(store, DAY_S, now=NOW) == 0


async def test_sqlite_file_shrinks_after_removal(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite"
    store = SqliteStore(file)
    for number in range(60):
        await add(store, f"s-{number}", completed_at=NOW - 2 * DAY_S, expires_at=NOW)
    await add(store, "kept", completed_at=NOW, expires_at=NOW)
    await store.close()
    before = file.stat().st_size
    store = SqliteStore(file)
    assert await remove_old_sessions(store, DAY_S, now=NOW) == 60
    assert len(await store.get_turns("kept")) == 1
    await store.close()
    assert before > 12_000_000
    assert file.stat().st_size < before / 10
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


async def test_store_above_its_size_loses_the_sessions_that_ended_first(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    for number in range(20):
        await add(store, f"s-{number:02}", completed_at=NOW - 1e6 + number, expires_at=NOW)
    await add(store, "just-ended", completed_at=NOW - 1, expires_at=NOW)
    await add(store, "open", completed_at=None, expires_at=NOW + DAY_S)
    whole = await store.used_bytes()
    assert whole > 4_000_000
    removed = await shrink_store(store, whole // 2, now=NOW)
    left = sorted(s.session_id for s in await store.list_sessions(SessionFilter()))
    assert 9 <= removed <= 13
    assert left == ["just-ended", "open", *(f"s-{number:02}" for number in range(removed, 20))]
    assert await store.used_bytes() <= whole // 2
    assert await shrink_store(store, 1, now=NOW) == 20 - removed
    left = [session.session_id for session in await store.list_sessions(SessionFilter())]
    assert left == ["just-ended", "open"]
    await store.close()


async def test_removal_does_not_run_in_the_event_loop(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    name = await store._writer.write(lambda _: threading.current_thread().name, may_block=True)
    assert name == "store-writer"
    await store.close()


async def test_proxy_removes_old_sessions_only_if_retention_is_set(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/shared.sqlite"
    keeps = await start_proxy(store=url)
    ended, still_open = await keeps.session(), await keeps.session()
    await keeps.control.complete(ended.trial_id)
    assert len(await keeps.control.list_sessions()) == 2
    removes = await start_proxy(store=url, retention={"completed_s": 1e-3})
    async with asyncio.timeout(20):
        while len(left := await removes.control.list_sessions()) == 2:
            """Polls until the background task has removed one session."""
    assert [session["trial_id"] for session in left] == [still_open.trial_id]
