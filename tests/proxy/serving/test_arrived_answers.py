"""A turn stays in `LiveSession.own` until the last mark of its delivery is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.records import Session, SessionKind, SessionStatus
from proxy.serving import ownership
from proxy.serving.ownership import Deliveries
from proxy.serving.sessions import LiveSession
from proxy.settings.profiles import Profiles
from proxy.store.protocol import DeliveryMark
from proxy.store.sqlite import SqliteStore


class SlowStore(SqliteStore):
    """A store that writes marks when `go_on` allows it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.writing = asyncio.Event()
        self.go_on = asyncio.Semaphore(0)

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        self.writing.set()
        await self.go_on.acquire()
        await super().mark_deliveries(marks)


async def test_answer_that_is_replayed_while_its_first_mark_is_written_stays_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "DELAY_S", 0.0)
    store = SlowStore(tmp_path / "s.sqlite")
    session = Session("t", b"", SessionKind.TRAIN, SessionStatus.OPEN, 1.0, 2.0)
    live = LiveSession(session, Profiles({}).get("default"))
    deliveries = Deliveries(store)
    live.own.add(0)
    deliveries.mark(live, 0, arrived=False)
    await store.writing.wait()
    deliveries.mark(live, 0, arrived=True)  # the retry got the answer meanwhile
    store.writing.clear()
    store.go_on.release()
    await store.writing.wait()
    assert live.own == {0}
    store.go_on.release()
    await deliveries.close()
    assert live.own == set()
    await store.close()
