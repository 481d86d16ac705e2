"""Tools that the agent runs, in the form of their dialect: offered, called, and their outputs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import orjson
import pytest

from proxy.records import ForkCause
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.wire.test_messages import assembled

ASKED = {"role": "user", "content": "Do it."}
OTHER = {"type": "function", "name": "other", "parameters": {"type": "object"}}
COMMANDS = {"commands": ["ls", "pwd"], "timeout_ms": 5}
PATCH = {"type": "update_file", "path": "a", "diff": "@@\n-x\n+y\n"}


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def client_of(session: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def causes(proxy: RunningProxy, session: Any) -> list[ForkCause | None]:
    _, turns = await proxy.record(session)
    return [turn.fork_cause for turn in turns]


TYPED: list[Any] = [
    (
        {"type": "local_shell"},
        {"command": ["ls", "-l"], "timeout_ms": 100},
        "local_shell_call",
        {"type": "local_shell_call_output", "output": "a"},
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        COMMANDS,
        "shell_call",
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "no", "outcome": {"type": "timeout"}},
            ],
        },
    ),
    (
        {"type": "apply_patch"},
        PATCH,
        "apply_patch_call",
        {"type": "apply_patch_call_output", "status": "failed"},
    ),
    (
        {"type": "computer"},
        {"type": "click", "x": 1, "y": 2, "button": "left"},
        "computer_call",
        {
            "type": "computer_call_output",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"},
        },
    ),
    (
        {"type": "tool_search", "execution": "client"},
        {"query": "weather"},
        "tool_search_call",
        {
            "type": "tool_search_output",
            "execution": "client",
            "tools": [{"type": "namespace", "name": "sky", "tools": [OTHER]}],
        },
    ),
    (
        {"type": "custom", "name": "patch"},
        {"input": "*** Begin"},
        "custom_tool_call",
        {"type": "custom_tool_call_output", "output": "ok"},
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "arguments", "kind", "output"), TYPED, ids=[t[2] for t in TYPED])
async def test_call_of_a_typed_tool_has_its_item_and_its_output_extends(
    proxy: RunningProxy,
    tool: dict[str, Any],
    arguments: dict[str, Any],
    kind: str,
    output: dict[str, Any],
    stream: bool,
) -> None:
    name = tool.get("name", tool["type"])
    proxy.answers("I look.\n" + call(name, arguments))
    session = await proxy.session()
    items: list[Any] = [ASKED]
    async with client_of(session) as client:
        for _ in range(3):
            tools: Any = [OTHER, tool]
            answer: Any = await client.responses.create(
                model="m", input=items, tools=tools, stream=stream
            )
            if stream:
                events = [event async for event in answer]
                answer = events[-1].response
                done = [e.item for e in events if e.type == "response.output_item.done"]
                assert [item.to_dict() for item in done] == [i.to_dict() for i in answer.output]
            message, made = answer.output
            assert (message.type, made.type) == ("message", kind)
            items += [message.to_dict(), made.to_dict()]
            items.append({"call_id": made.call_id, **output})
    assert await causes(proxy, session) == [None] * 3


async def test_found_tools_can_be_called(proxy: RunningProxy) -> None:
    proxy.answers(call("sky.other", {"a": 1}))
    session = await proxy.session()
    found = {
        "type": "tool_search_output",
        "call_id": "c",
        "tools": [{"type": "namespace", "name": "sky", "tools": [OTHER]}],
    }
    searched = {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}}
    tools = [{"type": "tool_search", "execution": "client"}]
    body = {"input": [ASKED, searched, found], "tools": tools}
    status, reply = await proxy.post(session, "responses", body)
    assert status == 200, reply
    (item,) = reply["output"]
    assert (item["namespace"], item["name"]) == ("sky", "other")


@pytest.mark.parametrize("arguments", [{"command": "ls"}, {}, {"command": [1]}])
async def test_call_that_does_not_fit_its_item_is_a_function_call(
    proxy: RunningProxy, arguments: dict[str, Any]
) -> None:
    proxy.answers(call("local_shell", arguments))
    session = await proxy.session()
    items: list[Any] = [ASKED]
    for _ in range(2):
        body = {"input": items, "tools": [{"type": "local_shell"}]}
        status, reply = await proxy.post(session, "responses", body)
        assert status == 200, reply
        (item,) = reply["output"]
        assert item["type"] == "function_call"
        assert json.loads(item["arguments"]) == arguments
        items += [
            item,
            {"type": "function_call_output", "call_id": item["call_id"], "output": "wrong"},
        ]
    assert await causes(proxy, session) == [None] * 2


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
         {"command": "view", "path": "/a"}),
        ({"type": "text_editor_20250124", "name": "str_replace_editor"},
         {"command": "undo_edit", "path": "/a"}),
        ({"type": "memory_20250818", "name": "memory"}, {"command": "view", "path": "/memories"}),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 800,
          "display_height_px": 600}, {"action": "left_click", "coordinate": [1, 2]}),
    ],
)  # fmt: skip
async def test_typed_tool_of_messages_is_called_by_its_name(
    proxy: RunningProxy, tool: dict[str, Any], arguments: dict[str, Any]
) -> None:
    proxy.answers(call(tool["name"], arguments))
    session = await proxy.session()
    client = anthropic.AsyncAnthropic(base_url=session.anthropic_base_url, api_key=session.api_key)
    messages: list[Any] = [ASKED]
    for _ in range(3):
        tools: Any = [tool]
        answer = await client.messages.create(
            model="m", max_tokens=100, messages=messages, tools=tools
        )
        (made,) = answer.content
        assert made.type == "tool_use"
        assert (made.name, made.input) == (tool["name"], arguments)
        picture = {"type": "base64", "media_type": "image/png", "data": "A" * 400}
        result = {"type": "tool_result", "tool_use_id": made.id}
        content = [{"type": "text", "text": "ok"}, {"type": "image", "source": picture}]
        messages += [
            {"role": "assistant", "content": [made.to_dict()]},
            {"role": "user", "content": [{**result, "content": content}]},
        ]
    await client.close()
    assert await causes(proxy, session) == [None] * 3
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert prompt.count("[image: image/png, 300 bytes; this model reads only text]") == 2
    await proxy.control.complete(session.trial_id)
    events = [e async for e in proxy.control.events(session.trial_id)]
    shown = [e for e in events if e["kind"] == "shown_as_text"]
    assert [(e["count"], e["parts"][0]["type"]) for e in shown] == [(1, "image")] * 2
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with proxy.http.get(f"{proxy.url}/metrics", headers=headers) as response:
        assert 'agentic_proxy_shown_as_text_total{type="image"} 2.0' in await response.text()


@pytest.mark.parametrize("stream", [False, True])
async def test_free_form_tools_of_chat(proxy: RunningProxy, stream: bool) -> None:
    proxy.answers("So.\n" + call("patch", {"input": "*** Begin"}) + call("other", {"a": 1}))
    session = await proxy.session()
    tools: Any = [
        {"type": "custom", "custom": {"name": "patch", "description": "Patches."}},
        {"type": "function", "function": {"name": "other", "parameters": {}}},
    ]
    messages: list[Any] = [ASKED]
    for _ in range(2):
        body = {"messages": messages, "tools": tools, "stream": stream}
        if stream:
            calls: dict[int, Any] = {}
            for event in (await proxy.events(session, "chat/completions", body))[:-1]:
                for choice in orjson.loads(event.removeprefix(b"data: "))["choices"]:
                    for part in choice["delta"].get("tool_calls", ()):
                        held = calls.setdefault(part["index"], part)
                        if held is not part:
                            held["function"]["arguments"] += part["function"]["arguments"]
            made = [calls[0], calls[1]]
        else:
            _, reply = await proxy.post(session, "chat/completions", body)
            made = reply["choices"][0]["message"]["tool_calls"]
        assert made[0]["custom"] == {"name": "patch", "input": "*** Begin"}
        assert json.loads(made[1]["function"]["arguments"]) == {"a": 1}
        message = {"role": "assistant", "content": "So.", "tool_calls": made}
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in made]
    assert await causes(proxy, session) == [None] * 2


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "none"}, None), ({"type": "auto"}, None), ({"type": "any"}, True), ("any", True),
     ({"type": "required"}, True), ({"type": "function", "function": {"name": "f"}}, True),
     ({"type": "tool", "name": "f"}, True),
     ({"type": "allowed_tools", "allowed_tools": {"mode": "required",
       "tools": [{"type": "function", "function": {"name": "f"}}]}}, True)],
)  # fmt: skip
async def test_forms_of_tool_choice_in_chat(
    proxy: RunningProxy, choice: Any, forced: bool | None
) -> None:
    session = await proxy.session()
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    body = {"messages": [ASKED], "tools": tools, "tool_choice": choice, "max_tokens": 9}
    status, reply = await proxy.post(session, "chat/completions", body)
    assert status == 200, reply
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert ("<tool_call>" in prompt.rpartition("<|im_start|>")[2]) is bool(forced)
    only = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert ('"name": "g"' in prompt) is not only


async def test_remote_compaction_of_codex_is_a_new_path(proxy: RunningProxy) -> None:
    """The request ends with `compaction_trigger`; its one item stands for the history after."""
    session = await proxy.session()
    items: list[Any] = [ASKED]
    proxy.answers(call("other", {"a": 1}))
    body = {"tools": [OTHER], "stream": True}
    _, reply = await proxy.post(session, "responses", {"input": items, "tools": [OTHER]})
    (made,) = reply["output"]
    output = {"type": "function_call_output", "call_id": made["call_id"], "output": "1"}
    items += [made, output]
    proxy.answers("a is 1")
    asked = {**body, "input": [*items, {"type": "compaction_trigger"}]}
    events = [
        orjson.loads(event.partition(b"data: ")[2])
        for event in await proxy.events(session, "responses", asked)
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["compaction"]
    assert events[-1]["response"]["output"] == done
    after = [ASKED, done[0], {"role": "user", "content": "Go on."}]
    for _ in range(2):
        _, reply = await proxy.post(session, "responses", {"input": after, "tools": [OTHER]})
        after += [*reply["output"], ASKED]
    assert await causes(proxy, session) == [None, None, ForkCause.COMPACTION, None]
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert "Summary of the earlier part of this conversation:\na is 1" in prompt


async def test_compact_endpoint_keeps_the_users_messages(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers("All done.")
    async with client_of(session) as client:
        items: Any = [ASKED, {"role": "assistant", "content": "Yes."}]
        answer = await client.responses.compact(model="m", input=items)
    assert answer.object == "response.compaction"
    assert [item.type for item in answer.output] == ["message", "compaction"]
    foreign = {"type": "compaction", "encrypted_content": "gAAAAABo"}
    body = {"input": [foreign, ASKED]}
    status, reply = await proxy.post(session, "responses", body)
    assert status == 200, reply
    assert await causes(proxy, session) == [None, ForkCause.COMPACTION]


async def test_references_show_a_deferred_tool_without_a_fork(proxy: RunningProxy) -> None:
    """Claude Code adds a tool to its list when its search has found it."""
    session = await proxy.session()
    search = {"name": "search", "input_schema": {"type": "object"}}
    found = {
        "name": "weather",
        "defer_loading": True,
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    proxy.answers(call("search", {}))
    body: dict[str, Any] = {"max_tokens": 200, "messages": [ASKED], "tools": [search]}
    _, first = await proxy.post(session, "messages", body)
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"]}
    body["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{**result, "content": [reference]}]},
    ]
    proxy.answers(call("weather", {"city": "Oslo"}))
    body |= {"tools": [search, found], "stream": True}
    message = assembled(await proxy.events(session, "messages", body))
    assert message["content"][0]["input"] == {"city": "Oslo"}
    assert await causes(proxy, session) == [None, None]
    prompt = proxy.rendering.tokenizer.decode(proxy.engine.calls[-1].prompt_ids)
    assert prompt.count('"weather"') == 1
