"""Calls that end early, and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from agent_loop.trajectory import build_segments
from proxy.client import ProxyClientError, SessionHandle
from proxy.errors import StoreError
from proxy.records import Turn, TurnStatus
from proxy.store.protocol import DeliveryMark
from proxy.store.sqlite import SqliteStore
from proxy.testing.scripted_engine import Fault
from tests.proxy.conftest import RunningProxy, StartProxy


class MarkingStore(SqliteStore):
    """A store that counts the delivery marks that it has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.marks = asyncio.Semaphore(0)

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        await super().mark_deliveries(marks)
        for _ in marks:
            self.marks.release()


CHAT = "chat/completions"
NO_PATIENCE = {"engine_patience_s": 0}
RETRY = {"x-stainless-retry-count": "1"}
LONG = "The answer is a sum of two numbers, thank you. " * 20


def chat(text: str = "Hi.", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def statuses(proxy: RunningProxy, session: SessionHandle) -> list[TurnStatus]:
    return [turn.status for turn in (await proxy.record(session))[1]]


async def cut_after_first_token(proxy: RunningProxy, session: SessionHandle, body: Any) -> None:
    """Makes a streamed call, and disconnects after the first event."""
    url, headers = f"{session.base_url}/{CHAT}", {"Authorization": f"Bearer {session.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=orjson.dumps(body), headers=headers) as response,
    ):
        await response.content.readany()
        response.close()


async def until_recorded(proxy: RunningProxy, session: SessionHandle, count: int) -> None:
    """Waits until `count` turns of the session have ended."""
    async with asyncio.timeout(10):
        async for event in proxy.control.events(session.trial_id):
            count -= event["kind"] == "turn"
            if not count:
                return


async def test_client_disconnect_ends_the_sampling(proxy: RunningProxy) -> None:
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


async def test_retry_after_disconnect_is_resampled_and_only_it_is_trained(
    proxy: RunningProxy,
) -> None:
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


async def test_retry_joins_the_running_call(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.02
    first = asyncio.create_task(proxy.post(session, CHAT, chat()))
    await proxy.engine.called.wait()

    second = asyncio.create_task(proxy.post(session, CHAT, chat(), **RETRY))

    (_, one), (_, two) = await first, await second
    assert one["choices"] == two["choices"]
    assert len(proxy.engine.calls) == 1
    assert await statuses(proxy, session) == [TurnStatus.DONE]


@pytest.mark.parametrize("other", [{"n": 2}, {"logprobs": True}])
async def test_retry_that_asks_for_more_parts_does_not_join(
    proxy: RunningProxy, other: dict[str, Any]
) -> None:
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.02
    first = asyncio.create_task(proxy.post(session, CHAT, chat()))
    await proxy.engine.called.wait()

    _, answer = await proxy.post(session, CHAT, chat(**other), **RETRY)

    assert len(answer["choices"]) == other.get("n", 1)
    if "logprobs" in other:
        assert all(each["logprobs"]["content"] for each in answer["choices"])
    assert (await first)[0] == 200


async def test_answer_requested_again_in_another_form_is_superseded(proxy: RunningProxy) -> None:
    """Claude Code repeats a stream that it could not use as a call without `stream`."""
    session = await proxy.session()
    await proxy.events(session, CHAT, chat(stream=True))

    await proxy.post(session, CHAT, chat())

    assert await statuses(proxy, session) == [TurnStatus.SUPERSEDED, TurnStatus.DONE]


async def test_truncated_answer_requested_with_larger_max_tokens_is_superseded(
    proxy: RunningProxy,
) -> None:
    """qwen-code repeats a truncated call with a larger `max_tokens`."""
    session = await proxy.session()
    proxy.answers("The answer is a sum of two numbers, thank you.")
    for max_tokens in (4, 4, 400):
        await proxy.post(session, CHAT, chat(max_tokens=max_tokens))

    superseded = TurnStatus.SUPERSEDED
    assert await statuses(proxy, session) == [superseded, superseded, TurnStatus.DONE]


async def test_same_request_twice_is_sampled_twice(proxy: RunningProxy) -> None:
    session = await proxy.session()
    replies = await asyncio.gather(*(proxy.post(session, CHAT, chat()) for _ in range(3)))
    assert [status for status, _ in replies] == [200, 200, 200]
    assert await statuses(proxy, session) == [TurnStatus.DONE] * 3
    assert len(proxy.engine.calls) == 3


async def test_retry_after_a_restart_gets_the_recorded_answer(start_proxy: StartProxy) -> None:
    before = await start_proxy()
    session = await before.session()
    _, answered = await before.post(session, CHAT, chat())
    after = await start_proxy(engine=before.engine)
    moved = SessionHandle(
        session.trial_id, session.api_key, f"{after.url}/v1", after.url, session.expires_at
    )

    _, again = await after.post(moved, CHAT, chat(), **RETRY)
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


async def test_siblings_are_replayed_after_a_restart_and_each_can_be_continued(
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

    _, again = await after.post(moved, CHAT, chat(n=2), **RETRY)
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
    start_proxy: StartProxy, stream: bool
) -> None:
    proxy = await start_proxy(limits=NO_PATIENCE)
    session = await proxy.session()
    proxy.engine.faults = [Fault("error")]
    status, reply = await proxy.post(session, CHAT, chat(stream=stream))
    assert status == 503
    assert reply["error"]["type"] == "server_error"
    assert await statuses(proxy, session) == [TurnStatus.CUT]


async def test_a_stream_whose_engine_does_not_come_back_ends_with_an_error(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits=NO_PATIENCE)
    session = await proxy.session()
    proxy.answers(LONG)
    proxy.engine.faults = [Fault("die", after_tokens=10)]

    events = await proxy.events(session, CHAT, chat(stream=True))

    assert b'"error"' in events[-1]
    assert b"[DONE]" not in events[-1]
    _, (turn,) = await proxy.record(session)
    assert turn.status is TurnStatus.CUT
    assert len(turn.sampled_ids) == 10


async def test_answer_with_a_missing_logprob_is_not_recorded_as_done(proxy: RunningProxy) -> None:
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


async def test_pause_holds_calls_and_sends_keep_alives(start_proxy: StartProxy) -> None:
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


async def test_calls_beyond_a_sessions_limits_are_refused(proxy: RunningProxy) -> None:
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


async def test_deleted_session_does_not_exist(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await proxy.post(session, CHAT, chat())
    await proxy.control.delete(session.trial_id)
    with pytest.raises(ProxyClientError) as caught:
        await proxy.control.show(session.trial_id)
    assert caught.value.status == 404
    assert (await proxy.post(session, CHAT, chat()))[0] == 401


async def test_clients_that_disconnect_at_any_moment_leave_no_turn_open(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = MarkingStore(tmp_path / "hang_up.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.001
    ended = asyncio.create_task(until_no_call_runs(proxy, session))
    calls = [
        asyncio.create_task(proxy.post(session, CHAT, chat(f"Hi {n}.", stream=n % 2 == 0)))
        for n in range(40)
    ]
    for call in calls:
        call.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await proxy.post(session, CHAT, chat("The last.")))[0] == 200
    await ended
    other = SqliteStore(tmp_path / "hang_up.db")
    async with asyncio.timeout(10):
        while await other.holder(session.trial_id) is not None:
            await store.marks.acquire()  # the session is held until its last mark is written
    assert TurnStatus.OPEN not in await statuses(proxy, session)
    await other.close()
    await store.close()


async def until_no_call_runs(proxy: RunningProxy, session: SessionHandle) -> None:
    """Waits until every turn that was begun has ended."""
    async with asyncio.timeout(20):
        async for event in proxy.control.events(session.trial_id):
            if event["kind"] == "turn" and event["status"] == TurnStatus.DONE:
                found = await statuses(proxy, session)
                if TurnStatus.OPEN not in found:
                    return


async def test_delivered_answers_are_not_replayed_after_the_session_is_reloaded(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = MarkingStore(tmp_path / "marks.db")
    proxy = await start_proxy(store=store, sessions={"cached": 1})
    session, other = await proxy.session(), await proxy.session()
    answers = iter(range(100))
    proxy.answers(lambda _: f"Answer {next(answers)}.")

    async def ask(times: int) -> list[str]:
        replies = [await proxy.post(session, CHAT, chat()) for _ in range(times)]
        return [reply["choices"][0]["message"]["content"] for _, reply in replies]

    said = await ask(4)
    for _ in said:
        await store.marks.acquire()  # once its marks are durable, a session can be evicted
    assert (await proxy.post(other, CHAT, chat("Another session.")))[0] == 200
    said += await ask(4)

    assert len(set(said)) == 8
    assert await statuses(proxy, session) == [TurnStatus.DONE] * 8
    await store.close()


async def test_delivered_answers_are_not_replayed_by_the_next_process(
    start_proxy: StartProxy,
) -> None:
    before = await start_proxy()
    session = await before.session()
    answers = iter(["One.", "Two."])
    before.answers(lambda _: next(answers))
    _, one = await before.post(session, CHAT, chat())
    after = await start_proxy(engine=before.engine)
    after.answers(lambda _: next(answers))
    moved = replace(session, base_url=f"{after.url}/v1")
    _, two = await after.post(moved, CHAT, chat())
    assert one["choices"] != two["choices"]


async def test_request_sent_before_an_answer_arrived_does_not_supersede_it(
    proxy: RunningProxy,
) -> None:
    """Two agents send the same request concurrently, one for a stream."""
    session = await proxy.session()
    body = orjson.dumps(chat())
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/{CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {session.api_key}\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert b"100" in await reader.readuntil(b"\r\n\r\n")  # its headers were read
    await proxy.events(session, CHAT, chat(stream=True))
    writer.write(body)
    assert b" 200 " in await reader.read()
    writer.close()
    assert await statuses(proxy, session) == [TurnStatus.DONE] * 2


async def test_engine_outage_does_not_use_up_max_turns(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(limits=NO_PATIENCE)
    session = await proxy.session(limits={"max_turns": 2})
    proxy.engine.faults = [Fault("error") for _ in range(3)]
    refused = [(await proxy.post(session, CHAT, chat(f"Hi {n}.")))[0] for n in range(3)]
    assert refused == [503] * 3
    assert (await proxy.post(session, CHAT, chat("One.")))[0] == 200
    assert (await proxy.post(session, CHAT, chat("Two.")))[0] == 200
    assert (await proxy.post(session, CHAT, chat("Three.")))[0] == 403


async def test_second_retry_of_a_delivered_answer_supersedes_it(proxy: RunningProxy) -> None:
    session = await proxy.session()
    _, first = await proxy.post(session, CHAT, chat())
    _, again = await proxy.post(session, CHAT, chat(), **RETRY)
    assert again["choices"] == first["choices"]
    await proxy.post(session, CHAT, chat(), **RETRY)
    assert await statuses(proxy, session) == [TurnStatus.SUPERSEDED, TurnStatus.DONE]


@pytest.mark.parametrize("headers", [{}, RETRY], ids=["repeated", "retry"])
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_retry_of_answers_of_which_one_was_not_recorded_is_trained_alone(
    start_proxy: StartProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    headers: dict[str, str],
) -> None:
    store = MarkingStore(tmp_path / "some.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    commit = store.commit_turn

    async def fails_at_one(turn: Turn, quota: str) -> None:
        if turn.index == failing:
            raise StoreError("database or disk is full")
        await commit(turn, quota)

    monkeypatch.setattr(store, "commit_turn", fails_at_one)
    assert (await proxy.post(session, CHAT, chat(n=3)))[0] == 503
    monkeypatch.undo()
    for _ in range(failing):
        await store.marks.acquire()

    status, answered = await proxy.post(session, CHAT, chat(n=3), **headers)

    assert (status, len(answered["choices"])) == (200, 3)
    _, turns = await proxy.record(session)
    expected = [TurnStatus.SUPERSEDED] * failing + [TurnStatus.CUT] * (3 - failing)
    assert [turn.status for turn in turns] == [*expected, *[TurnStatus.DONE] * 3]
    trained = sum(int(segment.mask.sum()) for segment in build_segments(turns))
    assert trained == answered["usage"]["completion_tokens"]
    await store.close()


async def test_error_while_an_intent_is_recorded_leaves_the_record_readable(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "errors.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    begin = store.begin_turn

    async def fails_once(turn: Turn, quota: str) -> None:
        monkeypatch.setattr(store, "begin_turn", begin)
        raise TypeError("not a value that the store can write")

    monkeypatch.setattr(store, "begin_turn", fails_once)
    url, headers = f"{session.base_url}/{CHAT}", {"Authorization": f"Bearer {session.api_key}"}
    async with proxy.http.post(url, json=chat(), headers=headers) as response:
        assert response.status == 500
    assert (await proxy.post(session, CHAT, chat()))[0] == 200
    _, turns = await proxy.record(session)
    assert [(turn.index, turn.status) for turn in turns] == [(0, TurnStatus.DONE)]
    await store.close()


async def test_answer_that_reaches_max_turns_and_is_lost_is_given_to_the_retry(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = MarkingStore(tmp_path / "lost.db")
    before = await start_proxy(store=store)
    session = await before.session(limits={"max_turns": 1})
    _, answered = await before.post(session, CHAT, chat())
    await store.marks.acquire()
    await store.mark_deliveries([DeliveryMark(session.trial_id, 0, arrived=False)])
    after = await start_proxy(store=store, engine=before.engine)
    moved = replace(session, base_url=f"{after.url}/v1")

    status, again = await after.post(moved, CHAT, chat())

    assert status == 200, again
    assert again["choices"] == answered["choices"]
    assert (await after.post(moved, CHAT, chat()))[0] == 403
    await store.close()


async def test_empty_answer_is_replayed(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.engine.script = lambda _: []
    _, empty = await proxy.post(session, CHAT, chat())
    status, again = await proxy.post(session, CHAT, chat(), **RETRY)
    assert (status, again["choices"]) == (200, empty["choices"])
    assert await statuses(proxy, session) == [TurnStatus.DONE]


async def test_retry_gets_the_alternatives_of_a_recorded_answer(proxy: RunningProxy) -> None:
    session = await proxy.session()
    body = chat(logprobs=True, top_logprobs=2)
    _, first = await proxy.post(session, CHAT, body)

    _, again = await proxy.post(session, CHAT, body, **RETRY)

    assert len(proxy.engine.calls) == 1
    tokens = again["choices"][0]["logprobs"]["content"]
    _, (turn,) = await proxy.record(session)
    assert turn.alternatives is not None
    texts = len(turn.sampled_ids) - 1  # without the end-of-turn token
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * texts
    recorded = turn.alternatives["logprob"][:texts, :2].tolist()
    assert [[top["logprob"] for top in token["top_logprobs"]] for token in tokens] == recorded
    bare = [{**token, "top_logprobs": []} for token in tokens]
    given = first["choices"][0]["logprobs"]["content"]
    assert bare == [{**token, "top_logprobs": []} for token in given]
