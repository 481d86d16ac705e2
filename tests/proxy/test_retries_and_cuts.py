"""Calls that end early, and calls that come again."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.client import ProxyClientError, SessionHandle
from proxy.engines.scripted import Fault
from proxy.records import TurnStatus
from tests.proxy.conftest import RunningProxy, StartProxy

CHAT = "chat/completions"
LONG = "The answer is a sum of two numbers, thank you. " * 20


def chat(text: str = "Hi.", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def statuses(proxy: RunningProxy, session: SessionHandle) -> list[TurnStatus]:
    return [turn.status for turn in (await proxy.record(session))[1]]


async def cut_after_first_token(proxy: RunningProxy, session: SessionHandle, body: Any) -> None:
    """Makes a streamed call, and hangs up once something came."""
    url, headers = f"{session.base_url}/{CHAT}", {"Authorization": f"Bearer {session.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=orjson.dumps(body), headers=headers) as response,
    ):
        await response.content.readany()
        response.close()


async def until_recorded(proxy: RunningProxy, session: SessionHandle, count: int) -> None:
    """Returns when `count` turns of the session have ended."""
    async with asyncio.timeout(10):
        async for event in proxy.control.events(session.trial_id):
            count -= event["kind"] == "turn"
            if not count:
                return


async def test_a_client_that_hangs_up_ends_the_sampling(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(LONG)
    proxy.engine.token_delay_s = 0.01
    ended = asyncio.create_task(until_recorded(proxy, session, 1))

    await cut_after_first_token(proxy, session, chat(stream=True))
    await ended

    call = proxy.engine.calls[0]
    async with asyncio.timeout(5):
        await call.abort.wait()
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.CUT
    assert 0 < len(turn.sampled_ids) < len(proxy.rendering.tokenizer.encode(LONG))
    assert turn.sampled_ids.tolist() == call.answer_ids[: len(turn.sampled_ids)]
    assert turn.versions[-1].end == len(turn.sampled_ids)


async def test_its_retry_is_sampled_anew_and_alone_trained(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(LONG)
    proxy.engine.token_delay_s = 0.01
    ended = asyncio.create_task(until_recorded(proxy, session, 1))
    await cut_after_first_token(proxy, session, chat(stream=True))
    await ended
    proxy.engine.token_delay_s = 0.0

    status, _ = await proxy.post(session, CHAT, chat())

    assert status == 200
    assert await statuses(proxy, session) == [TurnStatus.CUT, TurnStatus.DONE]
    assert proxy.engine.calls[0].prompt_ids == proxy.engine.calls[1].prompt_ids


async def test_a_retry_joins_the_running_call(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.02
    first = asyncio.create_task(proxy.post(session, CHAT, chat()))
    await proxy.engine.called.wait()

    retry = {"x-stainless-retry-count": "1"}
    second = asyncio.create_task(proxy.post(session, CHAT, chat(), **retry))

    (_, one), (_, two) = await first, await second
    assert one["choices"] == two["choices"]
    assert len(proxy.engine.calls) == 1
    assert await statuses(proxy, session) == [TurnStatus.DONE]


async def test_an_answer_asked_for_in_another_form_is_superseded(proxy: RunningProxy) -> None:
    """Claude Code repeats a stream that it could not use as a call without `stream`."""
    session = await proxy.session()
    await proxy.events(session, CHAT, chat(stream=True))

    await proxy.post(session, CHAT, chat())

    assert await statuses(proxy, session) == [TurnStatus.SUPERSEDED, TurnStatus.DONE]


async def test_an_answer_asked_for_with_more_room_is_superseded(proxy: RunningProxy) -> None:
    """qwen-code asks for what was truncated again, with a larger `max_tokens`."""
    session = await proxy.session()
    proxy.answers("The answer is a sum of two numbers, thank you.")
    for max_tokens in (4, 4, 400):
        await proxy.post(session, CHAT, chat(max_tokens=max_tokens))

    superseded = TurnStatus.SUPERSEDED
    assert await statuses(proxy, session) == [superseded, superseded, TurnStatus.DONE]


async def test_the_same_question_twice_is_two_samples(proxy: RunningProxy) -> None:
    session = await proxy.session()
    replies = await asyncio.gather(*(proxy.post(session, CHAT, chat()) for _ in range(3)))
    assert [status for status, _ in replies] == [200, 200, 200]
    assert await statuses(proxy, session) == [TurnStatus.DONE] * 3
    assert len(proxy.engine.calls) == 3


async def test_after_a_restart_a_retry_gets_the_recorded_answer(start_proxy: StartProxy) -> None:
    """The answer was recorded, and whether it arrived nobody knows any more."""
    before = await start_proxy()
    session = await before.session()
    _, answered = await before.post(session, CHAT, chat())
    after = await start_proxy(engine=before.engine)
    moved = SessionHandle(
        session.trial_id, session.api_key, f"{after.url}/v1", after.url, session.expires_at
    )

    _, again = await after.post(moved, CHAT, chat())
    status, more = await after.post(
        moved,
        CHAT,
        {
            "messages": [
                *chat()["messages"],
                again["choices"][0]["message"],
                {"role": "user", "content": "Go on."},
            ]
        },
    )

    assert again["choices"] == answered["choices"]
    assert status == 200, more
    _, turns = await after.record(session)
    assert [turn.parent for turn in turns] == [None, 0]
    assert turns[1].fork_cause is None


async def test_after_a_restart_siblings_are_given_again_and_each_is_gone_on_from(
    start_proxy: StartProxy,
) -> None:
    before = await start_proxy()
    session = await before.session()
    answers = iter(["The answer.", "A sum.", "Done.", "Done."])
    before.answers(lambda _: next(answers))
    _, answered = await before.post(session, CHAT, chat(n=2))
    after = await start_proxy(engine=before.engine)
    after.answers(lambda _: next(answers))
    moved = SessionHandle(
        session.trial_id, session.api_key, f"{after.url}/v1", after.url, session.expires_at
    )

    _, again = await after.post(moved, CHAT, chat(n=2))
    said = [choice["message"] for choice in again["choices"]]
    for message in said:
        history = [*chat()["messages"], message, {"role": "user", "content": "Go on."}]
        status, _ = await after.post(moved, CHAT, {"messages": history})
        assert status == 200

    assert again["choices"] == answered["choices"]
    assert len({message["content"] for message in said}) == 2
    _, turns = await after.record(session)
    assert [turn.parent for turn in turns] == [None, 0, 0, 1]
    assert [turn.fork_cause for turn in turns] == [None, "sibling", None, None]
    assert [t.shared_tokens == turns[t.parent or 0].path_tokens for t in turns[2:]] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_before_a_token_is_an_error_with_its_status(
    proxy: RunningProxy, stream: bool
) -> None:
    session = await proxy.session()
    proxy.engine.faults = [Fault("error")]
    status, reply = await proxy.post(session, CHAT, chat(stream=stream))
    assert status == 503
    assert reply["error"]["type"] == "server_error"
    assert await statuses(proxy, session) == [TurnStatus.CUT]


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(LONG)
    proxy.engine.faults = [Fault("die", after_tokens=10)]

    events = await proxy.events(session, CHAT, chat(stream=True))

    assert b'"error"' in events[-1]
    assert b"[DONE]" not in events[-1]
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.CUT
    assert len(turn.sampled_ids) == 10


async def test_a_token_without_its_logprob_is_never_recorded_as_done(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.engine.faults = [Fault("missing_logprob")]
    status, _ = await proxy.post(session, CHAT, chat())
    assert status == 502
    assert await statuses(proxy, session) == [TurnStatus.CUT]


async def test_completing_a_session_cuts_its_calls_and_refuses_later_ones(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    proxy.answers(LONG)
    proxy.engine.token_delay_s = 0.02
    call = asyncio.create_task(proxy.post(session, CHAT, chat()))
    await proxy.engine.called.wait()

    await proxy.control.complete(session.trial_id)

    assert (await call)[0] == 409
    assert (await proxy.post(session, CHAT, chat()))[0] == 409
    assert await statuses(proxy, session) == [TurnStatus.CUT]


async def test_a_pause_holds_calls_and_keeps_their_streams_alive(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(limits={"keep_alive_s": 0.05})
    session = await proxy.session()
    await proxy.control.pause()
    url, headers = f"{session.base_url}/{CHAT}", {"Authorization": f"Bearer {session.api_key}"}
    body = orjson.dumps(chat(stream=True))
    async with proxy.http.post(url, data=body, headers=headers) as response:
        lines = [await response.content.readline() for _ in range(6)]
        assert lines.count(b": keep-alive\n") >= 2
        assert not proxy.engine.calls
        await proxy.control.resume()
        assert b"[DONE]" in await response.read()


async def test_a_session_has_limits(proxy: RunningProxy) -> None:
    session = await proxy.session(limits={"max_turns": 2, "max_concurrent_calls": 1})
    proxy.engine.token_delay_s = 0.05
    first = asyncio.create_task(proxy.post(session, CHAT, chat("one")))
    await proxy.engine.called.wait()
    status, reply = await proxy.post(session, CHAT, chat("two"))
    assert (status, reply["error"]["code"]) == (429, "max_concurrent_calls")
    assert (await first)[0] == 200
    proxy.engine.token_delay_s = 0.0
    assert (await proxy.post(session, CHAT, chat("two")))[0] == 200
    status, reply = await proxy.post(session, CHAT, chat("three"))
    assert (status, reply["error"]["code"]) == (403, "max_turns")


async def test_a_deleted_session_is_gone(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await proxy.post(session, CHAT, chat())
    await proxy.control.delete(session.trial_id)
    with pytest.raises(ProxyClientError) as caught:
        await proxy.control.show(session.trial_id)
    assert caught.value.status == 404
    assert (await proxy.post(session, CHAT, chat()))[0] == 401
