"""A request gets access only to the session whose key it carries."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.conversation.message_keys import KnownKeys
from proxy.records import Reward, SessionKind
from proxy.store.sqlite import SqliteStore
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

CHAT = "chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Hi."}]}'


async def call(proxy: RunningProxy, path: str, **headers: str) -> int:
    async with proxy.http.post(proxy.url + path, data=BODY, headers=headers) as response:
        return response.status


async def test_key_and_path_must_belong_to_the_same_session(proxy: RunningProxy) -> None:
    mine, other = await proxy.session(), await proxy.session()
    key = {"Authorization": f"Bearer {mine.api_key}"}
    assert await call(proxy, f"/v1/{CHAT}", **key) == 200
    assert await call(proxy, f"/{mine.trial_id}/v1/{CHAT}", **key) == 200
    assert await call(proxy, f"/{mine.trial_id}/v1/v1/{CHAT}?beta=true", **key) == 200
    assert await call(proxy, f"/v1/{CHAT}", **{"x-api-key": mine.api_key}) == 200
    assert await call(proxy, f"/v1/{CHAT}/{mine.trial_id}", **key) == 200  # verl's alias
    for path in (
        f"/{other.trial_id}/v1/{CHAT}",
        f"/{mine.trial_id}/../{other.trial_id}/v1/{CHAT}",
        f"/{mine.trial_id}%2F..%2F{other.trial_id}/v1/{CHAT}",
        f"/{mine.trial_id.swapcase()}/v1/{CHAT}",
        f"/v1/{CHAT}/{other.trial_id}",
        f"/v1/{CHAT}/unknown",
        f"/{mine.trial_id}%00/v1/{CHAT}",
        f"/unknown/v1/{CHAT}",
    ):
        assert await call(proxy, path, **key) == 401, path
    assert (await proxy.record(other))[1] == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sk-unknown"},
        {"Authorization": "Basic c2s="},
        {"x-api-key": ""},
        {"x-api-key": "é"},
        {"Authorization": f"Bearer {ADMIN_KEY}"},
    ],
)
async def test_session_is_inaccessible_without_its_key(
    proxy: RunningProxy, headers: dict[str, str]
) -> None:
    session = await proxy.session()
    assert await call(proxy, f"/v1/{CHAT}", **headers) == 401
    assert await call(proxy, f"/{session.trial_id}/v1/{CHAT}", **headers) == 401


async def test_control_plane_needs_the_admin_key(proxy: RunningProxy) -> None:
    session = await proxy.session()
    for key in (None, "wrong", session.api_key):
        async with ProxyClient(proxy.url, key) as stranger:
            for attempt in (
                stranger.create_session(),
                stranger.list_sessions(),
                stranger.get_turns(session.trial_id),
                stranger.add_reward(session.trial_id, Reward("r", 1.0)),
                stranger.complete(session.trial_id),
                stranger.delete(session.trial_id),
                stranger.engines(),
                stranger.pause(),
                stranger.set_policy_version(3),
            ):
                with pytest.raises(ProxyClientError) as caught:
                    await attempt
                assert caught.value.status == 401
            assert await stranger.ready()


async def test_expired_session_gets_410(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.session(ttl_s=1)
    monkeypatch.setattr(time, "time", lambda: session.expires_at)
    assert (await proxy.post(session, CHAT, BODY))[0] == 410
    assert (await proxy.record(session))[0].status == "expired"


async def test_auto_create_needs_no_key_and_records_the_session_in_the_path(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(sessions={"auto_create": True})
    assert await call(proxy, f"/team/run-1/v1/{CHAT}") == 200
    record, turns = await proxy.control.get_turns("team/run-1")
    assert (record.kind, len(turns)) == (SessionKind.EVAL, 1)
    assert await call(proxy, f"/engines/v1/{CHAT}") == 400
    assert [s["trial_id"] for s in await proxy.control.list_sessions()] == ["team/run-1"]


@pytest.mark.parametrize(
    "trial_id", ["a/../b", "..", "a//b", "a b", "sessions/x", "x/v1", "é", "a" * 300, "a/rewards"]
)
async def test_ambiguous_id_is_refused(proxy: RunningProxy, trial_id: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"trial_id": trial_id}
    async with proxy.http.post(f"{proxy.url}/sessions", json=body, headers=headers) as response:
        assert response.status == 400
        assert "trial_id" in await response.text()


async def test_existing_id_is_refused(proxy: RunningProxy) -> None:
    await proxy.session(trial_id="a/b")
    with pytest.raises(ProxyClientError) as caught:
        await proxy.session(trial_id="a/b")
    assert caught.value.status == 409


async def test_no_key_is_in_logs_metrics_or_records(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    session = await proxy.session()
    await proxy.post(session, CHAT, BODY)
    await proxy.post(session, CHAT, b"{")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    said = caplog.text + str(await proxy.control.show(session.trial_id))
    for path in ("/metrics", f"/sessions/{session.trial_id}/trajectories", "/engines"):
        async with proxy.http.get(proxy.url + path, headers=headers) as response:
            assert response.status == 200
            said += await response.text()
    for secret in (session.api_key, session.api_key[3:], ADMIN_KEY):
        assert secret not in said


async def test_rewards_are_finite_and_idempotent(proxy: RunningProxy) -> None:
    session = await proxy.session()
    assert await proxy.control.add_reward(session.trial_id, Reward("verifier", 1.0, {"a": 0.5}))
    assert not await proxy.control.add_reward(session.trial_id, Reward("verifier", 0.0))
    for wrong in (Reward("r", float("nan")), Reward("r", 1.0, turn=5)):
        with pytest.raises(ProxyClientError) as caught:
            await proxy.control.add_reward(session.trial_id, wrong)
        assert caught.value.status == 400
    record, _ = await proxy.record(session)
    assert record.rewards == [Reward("verifier", 1.0, {"a": 0.5})]


async def test_completion_ends_a_long_poll_and_the_event_stream(proxy: RunningProxy) -> None:
    session = await proxy.session()
    assert not await proxy.control.wait_completed(session.trial_id, timeout_s=0.01)
    waiting = asyncio.create_task(proxy.control.wait_completed(session.trial_id, timeout_s=30))

    async def listen() -> list[str]:
        return [event["kind"] async for event in proxy.control.events(session.trial_id)]

    listening = asyncio.create_task(listen())
    await proxy.post(session, CHAT, BODY)
    await proxy.control.add_reward(session.trial_id, Reward("verifier", 1.0))
    await proxy.control.complete(session.trial_id)
    assert await waiting
    assert (await listening)[-2:] == ["reward", "completed"]


async def test_refused_call_is_an_event_but_not_a_turn(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await proxy.post(session, CHAT, b'{"messages": [], "n": 1}')
    await proxy.control.complete(session.trial_id)
    events = [event async for event in proxy.control.events(session.trial_id)]
    assert [event["kind"] for event in events] == ["refused", "completed"]
    assert (events[0]["route"], events[0]["status"]) == (CHAT, 400)
    since = events[0]["seq"]
    later = [event async for event in proxy.control.events(session.trial_id, since)]
    assert later == events[1:]
    assert (await proxy.record(session))[1] == []


@pytest.mark.parametrize("end", ["complete", "delete"])
async def test_a_session_that_ends_gives_back_the_memory_of_its_keys(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    used, keys = set[KnownKeys](), KnownKeys.keys

    def noted(own: KnownKeys, *args: Any, **more: Any) -> Any:
        used.add(own)
        return keys(own, *args, **more)

    monkeypatch.setattr(KnownKeys, "keys", noted)
    session = await proxy.session()
    messages = [{"role": "user", "content": str(number)} for number in range(20)]
    status, reply = await proxy.post(session, CHAT, {"messages": messages})
    assert status == 200, reply
    assert [known.memory_bytes > 0 for known in used] == [True]
    await getattr(proxy.control, end)(session.trial_id)
    assert [known.memory_bytes for known in used] == [0]


async def test_id_of_a_removed_session_can_be_used_again(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "removed.db")
    proxy = await start_proxy(store=store)
    old = await proxy.session(trial_id="t-1")
    assert await call(proxy, f"/v1/{CHAT}", **{"x-api-key": old.api_key}) == 200
    await proxy.control.complete("t-1")
    assert await store.remove_ended(time.time() + 1, 10) == 1
    new = await proxy.session(trial_id="t-1")
    assert await call(proxy, f"/v1/{CHAT}", **{"x-api-key": new.api_key}) == 200
    assert await call(proxy, f"/v1/{CHAT}", **{"x-api-key": old.api_key}) == 401
    assert await call(proxy, f"/v1/{CHAT}", **{"x-api-key": new.api_key}) == 200
    await store.close()


async def test_removed_session_is_forgotten_by_a_proxy_that_served_it(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """By retention, or by a command that deletes from the store."""
    store = SqliteStore(tmp_path / "removed.db")
    proxy = await start_proxy(store=store, sessions={"auto_create": True})
    path = f"/work/v1/{CHAT}"
    assert await call(proxy, path) == 200
    await proxy.control.complete("work")
    assert await call(proxy, path) == 409
    assert await store.remove_ended(time.time() + 1, 10) == 1
    assert await call(proxy, path) == 200
    await proxy.control.complete("work")
    await store.delete_session("work")
    await proxy.session(trial_id="work")
    assert not await proxy.control.wait_completed("work", timeout_s=0.05)
    await store.close()
