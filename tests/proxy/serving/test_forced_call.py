"""Required calls of a model that reasons: an answer that ends without one goes on with one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec import structs

from proxy.client import SessionHandle
from proxy.records import ForkCause, SessionKind, TurnStatus
from proxy.store.protocol import DeliveryMark
from proxy.store.sqlite import SqliteStore
from proxy.testing.scripted_engine import Fault
from tests.proxy.conftest import RunningProxy, StartProxy

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SAID = [
    "<think>\nHm.\n</think>\n\nI would rather talk.",
    "I would rather talk.",
    "",
    "<think>\nHm.",
]
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi."}],
    "tools": [TOOL],
    "tool_choice": "required",
}


def says(said: str, rest: str = ' {"command": "ls"}}\n</tool_call>') -> Any:
    """The model says `said`, and `rest` after the beginning of a call."""
    return lambda prompt: rest if prompt.endswith('"arguments":') else said


def put_together(events: list[bytes]) -> dict[str, Any]:
    """The message of a stream of Chat Completions."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        if event == b"data: [DONE]":
            continue
        for choice in orjson.loads(event.removeprefix(b"data: "))["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return message


async def ask(proxy: RunningProxy, session: SessionHandle, *, stream: bool) -> dict[str, Any]:
    if stream:
        return put_together(
            await proxy.events(session, "chat/completions", {**ASKED, "stream": True})
        )
    status, reply = await proxy.post(session, "chat/completions", ASKED)
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "tool_calls")
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID)
async def test_answer_that_ends_without_its_call_goes_on_with_one(
    said: str, stream: bool, proxy: RunningProxy
) -> None:
    session = await proxy.session()
    proxy.answers(says(said))

    message = await ask(proxy, session, stream=stream)

    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "shell"
    assert orjson.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert (message["content"] or "") == said.rpartition("\n\n")[2].replace("<think>\nHm.", "")
    assert (message.get("reasoning_content") or "") == ("Hm." if "Hm." in said else "")
    _, (first, second) = await proxy.record(session)
    sampled = [c.answer_ids for c in proxy.engine.calls]
    assert [first.sampled_ids.tolist(), second.sampled_ids.tolist()] == sampled
    assert {first.status, second.status} == {TurnStatus.DONE}
    assert second.fork_cause is ForkCause.CALL_REQUIRED
    prompt = proxy.engine.calls[1].prompt_ids
    assert second.prompt_tokens == len(prompt)
    assert prompt[: first.path_tokens - 1] == [*proxy.engine.calls[0].prompt_ids, *sampled[0][:-1]]

    result = {"role": "tool", "tool_call_id": call["id"], "content": "a b"}
    history = [*ASKED["messages"], {"role": "assistant", **message}, result]
    proxy.answers("Done.")
    status, _ = await proxy.post(
        session, "chat/completions", {**ASKED, "messages": history, "tool_choice": "auto"}
    )
    assert status == 200
    _, turns = await proxy.record(session)
    assert turns[2].fork_cause is None
    assert (turns[2].parent, turns[2].shared_tokens) == (1, turns[1].path_tokens)


async def test_call_that_the_model_makes_by_itself_needs_no_second_turn(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    proxy.answers(f"<think>\nHm.\n</think>\n\n{CALL}")
    message = await ask(proxy, session, stream=False)
    assert len(message["tool_calls"]) == 1
    assert len((await proxy.record(session))[1]) == 1


async def test_malformed_call_is_replaced_by_one_that_can_be_read(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(says("<think>\nHm.\n</think>\n\n<tool_call>\nls"))
    message = await ask(proxy, session, stream=False)
    (call,) = message["tool_calls"]
    assert orjson.loads(call["function"]["arguments"]) == {"command": "ls"}


async def test_truncated_answer_and_one_that_a_stop_string_ends_stay_without_a_call(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session(kind=SessionKind.EVAL)
    proxy.answers(says("I would rather talk to you."))
    for more in ({"max_tokens": 3}, {"stop": ["rather"]}):
        _, reply = await proxy.post(session, "chat/completions", {**ASKED, **more})
        assert "tool_calls" not in reply["choices"][0]["message"]
    assert len((await proxy.record(session))[1]) == 2


@pytest.mark.parametrize("by", ["previous_response_id", "created", "item_reference"])
async def test_responses_continue_the_turn_of_the_call(by: str, proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(says(SAID[0]))
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    request: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "stream": True}
    asked = [{"role": "user", "content": "Hi."}]
    events = await proxy.events(session, "responses", {**request, "input": asked})
    created, response = (
        orjson.loads(event.partition(b"data: ")[2])["response"] for event in (events[0], events[-1])
    )
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    result: dict[str, Any] = {
        "type": "function_call_output",
        "call_id": response["output"][2]["call_id"],
        "output": "a b",
    }
    proxy.answers("Done.")
    more: dict[str, Any] = {"previous_response_id": response["id"], "input": [result]}
    if by == "created":  # LangChain and the AI SDK of Vercel keep the id of the first event
        more["previous_response_id"] = created["id"]
    if by == "item_reference":
        known = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
        more = {"input": [*asked, *known, result]}
    status, reply = await proxy.post(session, "responses", {"tools": [tool], **more})
    assert status == 200, reply
    _, turns = await proxy.record(session)
    assert (turns[2].parent, turns[2].fork_cause) == (1, None)


async def test_stop_string_at_the_limit_of_tokens_is_a_stop(proxy: RunningProxy) -> None:
    session = await proxy.session(kind=SessionKind.EVAL)
    proxy.answers("I would rather talk to you.")
    size = proxy.rendering.count("I would rather")
    body = {"messages": ASKED["messages"], "max_tokens": size, "stop": ["rather"]}
    _, reply = await proxy.post(session, "chat/completions", body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "I would"
    assert choice["finish_reason"] == "stop"


class LosingStore(SqliteStore):
    """A store that records of every answer that it did not arrive."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.marks = asyncio.Semaphore(0)

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        await super().mark_deliveries([structs.replace(mark, arrived=False) for mark in marks])
        for _ in marks:
            self.marks.release()


@pytest.mark.parametrize("said", SAID)
async def test_lost_answer_of_two_turns_is_given_to_the_retry(
    said: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = LosingStore(tmp_path / "lost.db")
    before = await start_proxy(store=store)
    session = await before.session()
    before.answers(says(said))
    message = await ask(before, session, stream=False)
    for _ in range(2):
        await store.marks.acquire()
    after = await start_proxy(store=store, engine=before.engine)
    moved = replace(session, base_url=f"{after.url}/v1")
    after.answers(says("Another answer."))

    assert await ask(after, moved, stream=False) == message
    assert len((await after.record(session))[1]) == 2
    assert (await ask(after, moved, stream=False))["content"] == "Another answer."
    await store.close()


async def test_token_ids_of_an_answer_of_two_turns_are_those_of_its_log_probabilities(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    proxy.answers(says(SAID[0]))
    body = {**ASKED, "n": 2, "logprobs": True, "return_token_ids": True}
    _, reply = await proxy.post(session, "chat/completions", body)
    _, turns = await proxy.record(session)
    assert reply["prompt_token_ids"] == turns[0].prompt_ids.tolist()
    for choice, halves in zip(reply["choices"], (turns[0::2], turns[1::2]), strict=True):
        assert choice["token_ids"] == [i for turn in halves for i in turn.sampled_ids.tolist()]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])


@pytest.mark.parametrize("said", SAID)
async def test_answer_of_two_turns_requested_again_in_another_form_is_superseded(
    said: str, proxy: RunningProxy
) -> None:
    session = await proxy.session()
    proxy.answers(says(said))
    await ask(proxy, session, stream=True)
    await ask(proxy, session, stream=False)
    _, turns = await proxy.record(session)
    superseded, done = [TurnStatus.SUPERSEDED] * 2, [TurnStatus.DONE] * 2
    assert [turn.status for turn in turns] == superseded + done


async def test_truncated_required_call_requested_with_larger_max_tokens_is_superseded(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    proxy.answers(says("I would rather talk."))
    size = proxy.rendering.count("I would rather talk.") + 4
    replies = [
        (await proxy.post(session, "chat/completions", {**ASKED, "max_tokens": limit}))[1]
        for limit in (size, size, 400)
    ]
    reasons = [reply["choices"][0]["finish_reason"] for reply in replies]
    assert reasons == ["length", "length", "tool_calls"]
    _, turns = await proxy.record(session)
    superseded, done = [TurnStatus.SUPERSEDED] * 4, [TurnStatus.DONE] * 2
    assert [turn.status for turn in turns] == superseded + done


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_whose_required_call_failed_is_given_to_the_next_request_with_a_call(
    stream: bool, start_proxy: StartProxy
) -> None:
    proxy = await start_proxy(limits={"engine_patience_s": 0})
    session = await proxy.session()
    proxy.answers(says(SAID[0]))
    proxy.engine.faults = [None, Fault("error")]
    if stream:
        events = await proxy.events(session, "chat/completions", {**ASKED, "stream": True})
        assert b'"error"' in events[-1]
    else:
        assert (await proxy.post(session, "chat/completions", ASKED))[0] == 503

    message = await ask(proxy, session, stream=stream)

    assert message["content"] == "I would rather talk."
    assert len(message["tool_calls"]) == 1
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE, TurnStatus.CUT, TurnStatus.DONE]
    assert (turns[2].parent, turns[2].fork_cause) == (0, ForkCause.CALL_REQUIRED)


@pytest.mark.parametrize("choice", ["any", "auto"])
async def test_retry_gets_the_stop_sequence_of_a_lost_answer_and_no_call_after_it(
    choice: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    store = LosingStore(tmp_path / "lost.db")
    proxy = await start_proxy(store=store)
    session = await proxy.session()
    proxy.answers(says("<think>\nI would rather not.\n</think>\n\nI would rather talk."))
    request = {
        "model": "m",
        "max_tokens": 100,
        "messages": ASKED["messages"],
        "tools": [{"name": "shell", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": choice},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["talk", "rather"],
    }
    _, lost = await proxy.post(session, "messages", request)
    await store.marks.acquire()
    after = await start_proxy(store=store, engine=proxy.engine)
    moved = replace(session, base_url=f"{after.url}/v1")
    _, again = await after.post(moved, "messages", request)

    assert (lost["stop_reason"], lost["stop_sequence"]) == ("stop_sequence", "rather")
    assert again == lost | {"id": again["id"]}
    assert len(proxy.engine.calls) == 1
    await store.close()
