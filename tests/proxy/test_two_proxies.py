"""Two proxies on one store: a session goes on wherever its next call lands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.client import SessionHandle
from proxy.records import TurnStatus
from tests.postgres_server import empty_database
from tests.proxy.conftest import RunningProxy, StartProxy

CHAT = "chat/completions"


@pytest.fixture(params=["sqlite", "postgres"])
async def two_proxies(
    request: pytest.FixtureRequest, start_proxy: StartProxy, tmp_path: Path
) -> list[RunningProxy]:
    store = f"sqlite:///{tmp_path}/shared.sqlite"
    if request.param == "postgres":
        store = await empty_database(request.getfixturevalue("postgres"))
    one = await start_proxy(store=store)
    return [one, await start_proxy(store=store, engine=one.engine)]


async def test_calls_that_alternate_are_one_path(two_proxies: list[RunningProxy]) -> None:
    one = two_proxies[0]
    one.engine.expect_extension = True
    session = await one.session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count."}]
    for n in range(6):
        proxy = two_proxies[n % 2]
        proxy.answers(f"Number {n}.")
        status, reply = await proxy.post(at(session, proxy), CHAT, {"messages": messages})
        assert status == 200, reply
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Next."}]
    _, turns = await one.record(session)
    assert one.engine.violations == []
    assert [turn.parent for turn in turns] == [None, 0, 1, 2, 3, 4]
    assert [turn.fork_cause for turn in turns] == [None] * 6


async def test_calls_at_once_are_each_recorded_once(two_proxies: list[RunningProxy]) -> None:
    session = await two_proxies[0].session()

    async def call(n: int) -> int:
        proxy = two_proxies[n % 2]
        body = {"messages": [{"role": "user", "content": f"Question {n}"}]}
        status, _ = await proxy.post(at(session, proxy), CHAT, body)
        return status

    statuses = await asyncio.gather(*(call(n) for n in range(24)))
    _, turns = await two_proxies[1].record(session)
    assert [turn.index for turn in turns] == list(range(24))
    assert statuses == [200] * 24
    assert [turn.status for turn in turns] == [TurnStatus.DONE] * 24


async def test_completed_at_one_is_completed_at_the_other(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    session = await one.session()
    body = {"messages": [{"role": "user", "content": "Hello."}]}
    assert (await two.post(at(session, two), CHAT, body))[0] == 200
    await one.control.complete(session.trial_id)
    assert (await two.post(at(session, two), CHAT, body))[0] == 409


def at(session: SessionHandle, proxy: RunningProxy) -> SessionHandle:
    """The session as reached through that proxy."""
    return replace(session, base_url=f"{proxy.url}/v1")
