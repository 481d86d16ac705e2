"""Recorded requests give back the conversations that agents sent."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.conversation.messages import Message
from proxy.conversation.recorded import load_conversation
from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy

CHAT = "chat/completions"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'


async def test_every_turn_gives_back_the_conversation_that_was_sent(proxy: RunningProxy) -> None:
    session = await proxy.session(SessionKind.TRAIN)
    system = {"role": "system", "content": "Be brief."}
    first: dict[str, Any] = {"messages": [system, {"role": "user", "content": "List."}]}
    proxy.answers(CALL)
    _, reply = await proxy.post(session, CHAT, {**first, "tools": TOOLS})
    answer = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "a.txt"}
    second = [*first["messages"], answer, result]
    proxy.answers("One file.")
    await proxy.post(session, CHAT, {"messages": second, "tools": TOOLS, "n": 2})
    edited = [*second, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "?"}]
    await proxy.post(session, CHAT, {"messages": edited})

    _, turns = await proxy.record(session)
    assert len(turns) == 4
    start = [Message("system", "Be brief."), Message("user", "List.")]
    conversations = [load_conversation(turns, index) for index in range(4)]
    assert all(conversations)
    messages = [c.conversation.messages for c in conversations if c]
    assert messages[0] == start
    call = messages[1][2].tool_calls[0]
    assert (call.name, orjson.loads(call.arguments)) == ("ls", {"path": "."})
    assert messages[1][:2] == start
    assert messages[1][3] == Message("tool", "a.txt", tool_call_id=call.id)
    assert messages[2] == messages[1]  # the second of two answers to one request
    assert [(m.role, m.text) for m in messages[3][3:]] == [
        ("tool", "a.txt"),
        ("assistant", "Two."),
        ("user", "?"),
    ]
    assert [c.conversation.tools for c in conversations if c] == [TOOLS, TOOLS, TOOLS, []]
    # With other tools it is another conversation, which is recorded whole.
    assert [dict(c.answers) for c in conversations if c] == [{}, {2: 0}, {2: 0}, {}]
    assert len(turns[1].request) < 200  # only what the request adds


async def test_conversation_of_anthropics_dialect_is_recorded(proxy: RunningProxy) -> None:
    session = await proxy.session()
    body = {"model": "m", "max_tokens": 9, "system": "S", "messages": [user("Hi.")]}
    _, reply = await proxy.post(session, "messages", body)
    body["messages"] = [user("Hi."), {"role": "assistant", "content": reply["content"]}, user("B")]
    await proxy.post(session, "messages", body)
    _, turns = await proxy.record(session)
    conversation = load_conversation(turns, 1)
    assert conversation is not None
    assert [(m.role, m.text) for m in conversation.conversation.messages] == [
        ("system", "S"),
        ("user", "Hi."),
        ("assistant", "Hello."),
        ("user", "B"),
    ]


async def test_prompt_without_messages_has_no_conversation(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await proxy.post(session, "completions", {"prompt": "Once", "max_tokens": 4})
    _, turns = await proxy.record(session)
    assert load_conversation(turns, 0) is None


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
