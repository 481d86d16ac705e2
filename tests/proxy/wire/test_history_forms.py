"""Histories that agents send back in another form continue the recorded path."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from proxy.conversation.messages import Message, ToolCall, new_call_id, normalised
from tests.proxy.conftest import RunningProxy

TOOLS: list[Any] = [{"type": "function", "name": "shell", "parameters": {"type": "object"}}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {}}}]
ASKED = {"role": "user", "content": "List the files."}


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


THOUGHT = "<think>\nHm.\n</think>\n\nLet me look.\n"


async def post(proxy: RunningProxy, session: Any, route: str, **body: Any) -> Any:
    status, reply = await proxy.post(session, route, body)
    assert status == 200, reply
    return reply


async def path_of(proxy: RunningProxy, session: Any) -> list[tuple[int | None, Any]]:
    _, turns = await proxy.record(session)
    return [(turn.parent, turn.fork_cause) for turn in turns]


@pytest.mark.parametrize("stream", [False, True])
async def test_references_to_items_continue_the_recorded_path(
    proxy: RunningProxy, stream: bool
) -> None:
    proxy.answers(THOUGHT + call('{"cmd": "ls"}') + call('{"cmd": "pwd"}'))
    session = await proxy.session()
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    items: list[Any] = [ASKED]
    for _ in range(3):
        answer: Any = await client.responses.create(
            model="m", input=items, tools=TOOLS, stream=stream
        )
        if stream:
            answer = [event async for event in answer][-1].response
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        items += [{"type": "item_reference", "id": item.id} for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a"}
            for item in answer.output[2:]
        ]
    await client.close()
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


@pytest.mark.parametrize(
    "item_id",
    ["msg_7_ab", "fc_0_0_call_x", "fc_0_9_c", "rs_0_ab", "rs_99999999999_a", "nonsense", ""],
)
async def test_reference_to_an_unknown_item_is_a_404_that_names_it(
    proxy: RunningProxy, item_id: str
) -> None:
    session = await proxy.session()
    await post(proxy, session, "responses", input=[ASKED])
    items = [ASKED, {"type": "item_reference", "id": item_id}]
    status, reply = await proxy.post(session, "responses", {"input": items})
    assert status == 404
    assert repr(item_id) in reply["error"]["message"]
    assert reply["error"]["param"] == "input"
    assert len(await path_of(proxy, session)) == 1


async def test_responses_usage_has_every_field_of_the_sdk_types(proxy: RunningProxy) -> None:
    session = await proxy.session()
    reply = await post(proxy, session, "responses", input=[ASKED])
    openai.types.responses.ResponseUsage.model_validate(reply["usage"], strict=True)


async def test_alternating_calls_and_outputs_are_one_answer(proxy: RunningProxy) -> None:
    proxy.answers("Let me look.\n" + "".join(call(f'{{"n": {n}}}') for n in range(3)))
    session = await proxy.session()
    items: list[Any] = [ASKED]
    for _ in range(3):
        output = (await post(proxy, session, "responses", input=items, tools=TOOLS))["output"]
        items.append(output[0])
        for item in output[1:]:
            items += [
                item,
                {"type": "function_call_output", "call_id": item["call_id"], "output": "a"},
            ]
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


async def test_calls_of_successive_answers_stay_apart(proxy: RunningProxy) -> None:
    proxy.answers(call('{"cmd": "ls"}'))
    session = await proxy.session()
    items: list[Any] = [ASKED]
    for _ in range(3):
        (item,) = (await post(proxy, session, "responses", input=items, tools=TOOLS))["output"]
        items += [
            item,
            {"type": "function_call_output", "call_id": item["call_id"], "output": "a"},
        ]
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("route", "profile"),
    [("chat/completions", "default"), ("chat/completions", "follow"), ("messages", "default")],
)
async def test_successive_answers_in_one_message_stay_apart(
    proxy: RunningProxy, route: str, count: int, profile: str
) -> None:
    """As Goose joins those that have the same reasoning: all calls, then all results."""
    proxy.answers("<think>\nHm.\n</think>\n\n" + call('{"cmd": "ls"}') * count)
    session = await proxy.session(profile=profile)
    joined: list[Any] = []
    results: list[Any] = []
    messages: list[Any] = [ASKED]
    for _ in range(4):
        if route == "messages":
            body: Any = {"max_tokens": 100, "tools": [{"name": "shell", "input_schema": {}}]}
            answer = (await post(proxy, session, route, messages=messages, **body))["content"]
            made = [block for block in answer if block["type"] == "tool_use"]
            results += [
                {"type": "tool_result", "tool_use_id": each["id"], "content": "a"} for each in made
            ]
            joined += made
            message: Any = {"role": "assistant", "content": joined}
            messages = [ASKED, message, {"role": "user", "content": results}]
        else:
            body = {"messages": messages, "tools": CHAT_TOOLS}
            answer = (await post(proxy, session, route, **body))["choices"][0]["message"]
            made = answer["tool_calls"]
            results += [{"role": "tool", "tool_call_id": c["id"], "content": "a"} for c in made]
            joined += made
            message = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": joined}
            messages = [ASKED, message, *results]
        assert len(made) == count
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None), (2, None)]


@pytest.mark.parametrize("profile", ["default", "follow"])
async def test_reasoning_returned_inside_the_content_continues_the_path(
    proxy: RunningProxy, profile: str
) -> None:
    proxy.answers(THOUGHT.strip())
    session = await proxy.session(profile=profile)
    messages: list[Any] = [ASKED]
    for _ in range(3):
        reply = await post(proxy, session, "chat/completions", messages=messages)
        answer = reply["choices"][0]["message"]
        content = f"<think>\n{answer['reasoning_content']}\n</think>\n\n{answer['content']}"
        messages += [{"role": "assistant", "content": content}, ASKED]
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


@pytest.mark.parametrize("profile", ["default", "follow"])
async def test_reasoning_kept_from_a_cut_answer_does_not_fork(
    proxy: RunningProxy, profile: str
) -> None:
    proxy.answers(THOUGHT.strip())
    session = await proxy.session(profile=profile)
    cut = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "I was"}]}
    items: list[Any] = [ASKED, cut]
    for _ in range(3):
        output = (await post(proxy, session, "responses", input=items))["output"]
        items += [*output, ASKED, cut]
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


async def test_numbers_reserialised_by_javascript_continue_the_path(proxy: RunningProxy) -> None:
    proxy.answers(call('{"a": 1.0, "b": 1e3, "c": 9007199254740993, "d": -0.0}'))
    session = await proxy.session()
    messages: list[Any] = [ASKED]
    for _ in range(3):
        body = {"messages": messages, "tools": CHAT_TOOLS}
        reply = await post(proxy, session, "chat/completions", **body)
        answer = reply["choices"][0]["message"]
        (made,) = answer["tool_calls"]
        made["function"]["arguments"] = '{"a":1,"b":1000,"c":9007199254740992,"d":0}'
        messages += [answer, {"role": "tool", "tool_call_id": made["id"], "content": "a"}]
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


def test_ids_of_calls_in_one_answer_share_a_prefix() -> None:
    calls: list[ToolCall] = []
    for _ in range(3):
        calls.append(ToolCall(new_call_id(calls), "f", "{}"))
    assert len({call.id for call in calls}) == 3
    assert len({call.id[:-4] for call in calls}) == 1
    assert new_call_id()[:-4] != calls[0].id[:-4]


def test_results_follow_the_calls_of_their_answer() -> None:
    """A result of no call of these stays last; foreign ids do not say which answer a call is of."""
    one, two = ToolCall(new_call_id(), "f", "{}"), ToolCall(new_call_id(), "g", "{}")
    results = [Message("tool", each.id, tool_call_id=each.id) for each in (two, one)]
    stray = Message("tool", "?", tool_call_id="call_9")
    after = Message("user", "Go on.")
    assert normalised([Message("assistant", "Hi.", "Hm.", [one, two]), *results, stray, after]) == [
        Message("assistant", "Hi.", "Hm.", [one]),
        results[1],
        Message("assistant", "", "Hm.", [two]),
        results[0],
        stray,
        after,
    ]
    for same in (
        [Message("assistant", tool_calls=[one, ToolCall("a", "f", "{}")]), results[1], stray],
        [Message("assistant", tool_calls=[one, two])],
    ):
        assert normalised(same) == same


def test_calls_with_foreign_ids_are_not_joined_across_results() -> None:
    messages = [
        Message("user", "Hi."),
        Message("assistant", tool_calls=[ToolCall("a", "f", "{}")]),
        Message("tool", "1", tool_call_id="a"),
        Message("assistant", tool_calls=[ToolCall("b", "f", "{}")]),
        Message("tool", "2", tool_call_id="b"),
    ]
    assert normalised(messages) == messages


async def dropped_text(proxy: RunningProxy, session: Any, *, samples: int = 1) -> None:
    """Three turns of an agent that leaves out the text next to the calls."""
    messages: list[Any] = [ASKED]
    for _ in range(3):
        for number in range(samples):
            proxy.answers(f"{THOUGHT}({number})\n" + call('{"cmd": "ls"}'))
            reply = await post(
                proxy, session, "chat/completions", messages=messages, tools=CHAT_TOOLS
            )
        calls = reply["choices"][0]["message"]["tool_calls"]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "a b"},
        ]


async def test_text_dropped_beside_a_call_stays_in_the_prompt(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await dropped_text(proxy, session)
    assert await path_of(proxy, session) == [(None, None), (0, None), (1, None)]


async def test_text_dropped_forks_if_the_profile_follows_the_agent(proxy: RunningProxy) -> None:
    session = await proxy.session(profile="follow")
    await dropped_text(proxy, session)
    causes = {cause for _, cause in (await path_of(proxy, session))[1:]}
    assert causes == {"text_dropped"}


async def test_text_dropped_forks_if_two_answers_differ_only_in_their_text(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    await dropped_text(proxy, session, samples=2)
    causes = [cause for _, cause in await path_of(proxy, session)]
    assert causes == [None, "sibling", "text_dropped", "sibling", "text_dropped", "sibling"]
