"""Two proxies on one store: a session continues at whichever proxy gets its next call."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from proxy.client import SessionHandle
from proxy.errors import HeldElsewhere
from proxy.records import Reward, Turn, TurnStatus
from proxy.serving.call import LiveCall
from tests.proxy.conftest import RunningProxy, StartProxy

CHAT = "chat/completions"


@pytest.fixture
async def lively_proxies(shared_store: str, start_proxy: StartProxy) -> list[RunningProxy]:
    """The second one soon looks for what the first one has added to the store."""
    one = await start_proxy(store=shared_store)
    soon = {"keep_alive_s": 0.05}
    return [one, await start_proxy(store=shared_store, engine=one.engine, limits=soon)]


async def test_calls_alternating_between_proxies_form_one_path(
    two_proxies: list[RunningProxy],
) -> None:
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


async def test_concurrent_calls_are_each_recorded_once(two_proxies: list[RunningProxy]) -> None:
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


async def test_concurrent_calls_are_all_served_by_one_proxy(
    two_proxies: list[RunningProxy],
) -> None:
    """The session's limits therefore count all calls, wherever they arrive."""
    one, two = two_proxies
    session = await one.session(limits={"max_concurrent_calls": 2})
    one.engine.token_delay_s = 0.05
    first = asyncio.create_task(one.post(session, CHAT, chat("One.")))
    await one.engine.called.wait()
    second = asyncio.create_task(two.events(at(session, two), CHAT, chat("Two.", stream=True)))
    await until_sampling(one, 2)
    status, reply = await two.post(at(session, two), CHAT, chat("Three."))
    assert (status, reply["error"]["code"]) == (429, "max_concurrent_calls")
    assert (await first)[0] == 200
    assert (await second)[-1] == b"data: [DONE]"
    assert [turn.status for turn in (await two.record(session))[1]] == [TurnStatus.DONE] * 2


async def test_retry_at_the_other_proxy_joins_the_running_call(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    session = await one.session()
    assert (await two.post(at(session, two), CHAT, chat("Before.")))[0] == 200
    one.engine.token_delay_s = 0.05
    one.engine.called.clear()
    first = asyncio.create_task(one.post(session, CHAT, chat("Hello.")))
    await one.engine.called.wait()
    retry = {"x-stainless-retry-count": "1"}
    second = asyncio.create_task(two.post(at(session, two), CHAT, chat("Hello."), **retry))
    (_, answer), (_, again) = await first, await second
    assert answer["choices"] == again["choices"]
    assert len(one.engine.calls) == 2
    assert [turn.status for turn in (await two.record(session))[1]] == [TurnStatus.DONE] * 2


async def test_retry_at_the_other_proxy_gets_the_recorded_answer(
    two_proxies: list[RunningProxy],
) -> None:
    """The answer may have been lost on its way; it must not be sampled or trained twice."""
    one, two = two_proxies
    session = await one.session()
    assert (await two.post(at(session, two), CHAT, chat("Before.")))[0] == 200
    _, answer = await one.post(session, CHAT, chat("Hello."))
    retry = {"x-stainless-retry-count": "1"}
    _, again = await two.post(at(session, two), CHAT, chat("Hello."), **retry)
    assert answer["choices"] == again["choices"]
    assert len(one.engine.calls) == 2


@pytest.mark.parametrize("end", ["complete", "delete"])
async def test_session_ended_at_one_proxy_is_cut_at_the_other(
    two_proxies: list[RunningProxy], end: str
) -> None:
    one, two = two_proxies
    session = await one.session()
    one.engine.token_delay_s = 30.0
    running = asyncio.create_task(one.post(session, CHAT, chat("For ever.")))
    await one.engine.called.wait()
    await getattr(two.control, end)(session.trial_id)
    status, reply = await running
    assert status == (409 if end == "complete" else 404), reply
    assert len(one.engine.aborts) == 1


async def test_turns_recorded_by_the_other_proxy_are_continued(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    session = await one.session()
    one.engine.token_delay_s = 0.05
    slow = asyncio.create_task(one.post(session, CHAT, chat("Slow.")))
    await one.engine.called.wait()
    assert (await two.post(at(session, two), CHAT, chat("Beside it.")))[0] == 200
    _, reply = await slow
    messages = [*chat("Slow.")["messages"], reply["choices"][0]["message"]]
    messages.append({"role": "user", "content": "Go on."})
    assert (await two.post(at(session, two), CHAT, {"messages": messages}))[0] == 200
    *_, last = (await two.record(session))[1]
    assert (last.parent, last.fork_cause) == (0, None)


async def continued(proxy: RunningProxy, session: SessionHandle, response: str) -> Turn:
    """The turn that continues a response."""
    body = {"input": "Go on.", "previous_response_id": response}
    status, more = await proxy.post(session, "responses", body)
    assert status == 200, more
    *_, last = (await proxy.record(session))[1]
    return last


async def test_response_of_the_other_proxy_is_continued(two_proxies: list[RunningProxy]) -> None:
    one, two = two_proxies
    session = await one.session()
    assert (await two.post(at(session, two), "responses", {"input": "Before."}))[0] == 200
    _, reply = await one.post(session, "responses", {"input": "Hello."})
    last = await continued(two, at(session, two), reply["id"])
    assert (last.parent, last.fork_cause) == (1, None)


async def test_session_completed_at_one_proxy_is_completed_at_the_other(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    session = await one.session()
    body = {"messages": [{"role": "user", "content": "Hello."}]}
    assert (await two.post(at(session, two), CHAT, body))[0] == 200
    await one.control.complete(session.trial_id)
    assert (await two.post(at(session, two), CHAT, body))[0] == 409


async def until_sampling(proxy: RunningProxy, calls: int) -> None:
    """Waits until the engine got `calls` calls."""
    while len(proxy.engine.calls) < calls:
        proxy.engine.called.clear()
        await proxy.engine.called.wait()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def at(session: SessionHandle, proxy: RunningProxy) -> SessionHandle:
    """The session with the URLs of that proxy."""
    return replace(session, base_url=f"{proxy.url}/v1")


async def test_response_is_continued_here_if_the_other_proxy_lets_go_of_the_session(
    proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.session()
    _, reply = await proxy.post(session, "responses", {"input": "Hello."})
    held = iter([HeldElsewhere("http://127.0.0.1:9")])
    run = LiveCall._open

    async def run_later(call: LiveCall, begin: Any) -> Any:
        for error in held:
            raise error
        return await run(call, begin)

    monkeypatch.setattr(LiveCall, "_open", run_later)
    last = await continued(proxy, session, reply["id"])
    assert (last.parent, last.fork_cause) == (0, None)


async def test_completion_at_one_proxy_is_known_to_a_long_poll_at_the_other(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    session = await one.session()
    assert not await two.control.wait_completed(session.trial_id, timeout_s=0)
    await one.control.complete(session.trial_id)
    assert await two.control.wait_completed(session.trial_id, timeout_s=0)


async def test_event_stream_at_one_proxy_has_the_events_of_the_other_and_ends(
    lively_proxies: list[RunningProxy],
) -> None:
    one, two = lively_proxies
    session = await one.session()
    events = two.control.events(session.trial_id)
    async with asyncio.timeout(10):
        await two.control.add_reward(session.trial_id, Reward("first", 1.0))
        assert (await anext(events))["key"] == "first"
        await one.control.add_reward(session.trial_id, Reward("second", 1.0))
        await one.control.complete(session.trial_id)
        rest = [event async for event in events]
    assert [event["kind"] for event in rest] == ["reward", "completed"]


async def test_completion_at_one_proxy_ends_a_long_poll_at_the_other(
    lively_proxies: list[RunningProxy],
) -> None:
    one, two = lively_proxies
    session = await one.session()
    waiting = asyncio.create_task(two.control.wait_completed(session.trial_id, timeout_s=60))
    assert not await two.control.wait_completed(session.trial_id, timeout_s=0.1)
    await one.control.complete(session.trial_id)
    async with asyncio.timeout(10):
        assert await waiting
