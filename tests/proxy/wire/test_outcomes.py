"""Every type of item, block and tool of the installed SDKs has a decided outcome, which holds."""

from __future__ import annotations

import sys
import typing
from typing import Any, ForwardRef, get_args, get_origin

import anthropic.types
import anthropic.types.beta
import openai.types.chat
import openai.types.responses
import orjson
import pytest
from anthropic.types import tool_result_block_param
from anthropic.types.beta import beta_tool_result_block_param
from openai.types.responses import response_function_call_output_item_list_param as outputs

from proxy.errors import RequestError
from proxy.settings.profiles import AgentProfile
from proxy.wire.body import Body, parse_call
from proxy.wire.dialect import Call
from proxy.wire.outcomes import (
    CHAT_CONTENT,
    CHAT_TOOLS,
    MESSAGES_BLOCKS,
    MESSAGES_TOOLS,
    RESPONSES_CONTENT,
    RESPONSES_ITEMS,
    RESPONSES_TOOLS,
    Fate,
)
from proxy.wire.registry import open_dialects

DIALECTS = open_dialects()
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADU"
    "lEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def words_of(annotation: Any, module: str) -> list[str]:
    """The strings of a `Literal`, however it is wrapped or quoted."""
    if isinstance(annotation, str | ForwardRef):
        text = annotation if isinstance(annotation, str) else annotation.__forward_arg__
        scope = {**vars(typing), **vars(sys.modules["typing_extensions"])}
        annotation = eval(text, {**scope, **vars(sys.modules[module])})
    if get_origin(annotation) is typing.Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for inner in get_args(annotation) for word in words_of(inner, module)]


def kinds_of(union: Any) -> set[str]:
    """The values of `type` of all members of a union of typed dictionaries."""
    if isinstance(union, type) and "type" in getattr(union, "__annotations__", {}):
        return set(words_of(union.__annotations__["type"], union.__module__))
    return {kind for member in get_args(union) for kind in kinds_of(member)}


beta = anthropic.types.beta
UNIONS: list[tuple[str, Any, dict[str, Fate]]] = [
    ("items", openai.types.responses.ResponseInputItemParam, RESPONSES_ITEMS),
    ("tools", openai.types.responses.ToolParam, RESPONSES_TOOLS),
    ("content", openai.types.responses.ResponseInputContentParam, RESPONSES_CONTENT),
    (
        "outputs",
        outputs.ResponseFunctionCallOutputItemListParam,
        RESPONSES_CONTENT,
    ),
    ("blocks", anthropic.types.ContentBlockParam, MESSAGES_BLOCKS),
    ("beta blocks", beta.BetaContentBlockParam, MESSAGES_BLOCKS),
    ("results", tool_result_block_param.Content, MESSAGES_BLOCKS),
    ("beta results", beta_tool_result_block_param.Content, MESSAGES_BLOCKS),
    ("tools of messages", anthropic.types.ToolUnionParam, MESSAGES_TOOLS),
    ("beta tools", beta.BetaToolUnionParam, MESSAGES_TOOLS),
    ("parts", openai.types.chat.ChatCompletionContentPartParam, CHAT_CONTENT),
    ("tools of chat", openai.types.chat.ChatCompletionToolUnionParam, CHAT_TOOLS),
]


@pytest.mark.parametrize(
    ("union", "table"), [each[1:] for each in UNIONS], ids=[u[0] for u in UNIONS]
)
def test_every_type_of_the_sdks_is_decided(union: Any, table: dict[str, Fate]) -> None:
    kinds = kinds_of(union)
    assert len(kinds) > 1
    assert kinds - table.keys() == set()


def parsed(route: str, body: dict[str, Any]) -> Call:
    return parse_call(DIALECTS[route], Body(orjson.dumps(body)), {}, AgentProfile())


def fate(call: Call, text: str) -> Fate:
    """The fate of a part that says `text`, from the call that has it."""
    if call.notes:
        assert {note.kind for note in call.notes} == {"shown_as_text"}
        assert all(note.text and note.text in said(call) for note in call.notes)
        return Fate.SHOWN
    return Fate.UNDERSTOOD if text in said(call) else Fate.SILENT


def said(call: Call) -> str:
    messages = call.conversation.messages
    calls = [c for message in messages for c in message.tool_calls]
    texts = [f"{m.text} {m.reasoning or ''}" for m in messages]
    return "\n".join(
        [*texts, *(f"{c.name} {c.arguments}" for c in calls), str(call.conversation.tools)]
    )


IMAGE = {"type": "base64", "media_type": "image/png", "data": PNG}
WORD = "xyzzy"
SAMPLES: dict[str, dict[str, Any]] = {
    "message": {"role": "user", "content": WORD},
    "function_call": {"name": "f", "call_id": "c", "arguments": f'{{"a": "{WORD}"}}'},
    "custom_tool_call": {"name": "f", "call_id": "c", "input": WORD},
    "reasoning": {"summary": [{"type": "summary_text", "text": WORD}]},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": [WORD], "env": {}}},
    "shell_call": {"call_id": "c", "action": {"commands": [WORD]}},
    "apply_patch_call": {"call_id": "c", "operation": {"type": "delete_file", "path": WORD}},
    "apply_patch_call_output": {"call_id": "c", "status": "completed", "output": WORD},
    "computer_call": {"call_id": "c", "action": {"type": "type", "text": WORD}},
    "computer_call_output": {
        "call_id": "c",
        "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PNG}"},
    },
    "shell_call_output": {
        "call_id": "c",
        "output": [{"stdout": WORD, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "tool_search_call": {"call_id": "c", "execution": "client", "arguments": {"query": WORD}},
    "tool_search_output": {
        "call_id": "c",
        "execution": "client",
        "tools": [{"type": "function", "name": WORD, "parameters": {}}],
    },
    "additional_tools": {
        "role": "developer",
        "tools": [{"type": "function", "name": WORD, "parameters": {}}],
    },
    "agent_message": {
        "author": "/root",
        "recipient": "/root/a",
        "content": [{"type": "encrypted_content", "encrypted_content": WORD}],
    },
    "image_generation_call": {"id": "i", "result": PNG, "revised_prompt": "a fox"},
    "tool_use": {"id": "c", "name": "f", "input": {"a": WORD}},
    "tool_result": {"tool_use_id": "c", "content": WORD},
    "tool_reference": {"tool_name": WORD},
    "thinking": {"thinking": WORD, "signature": ""},
    "search_result": {"title": WORD, "source": "s", "content": [{"type": "text", "text": "t"}]},
    "image": {"source": IMAGE},
    "document": {"source": {**IMAGE, "media_type": "application/pdf"}, "title": "a.pdf"},
    "image_url": {"image_url": {"url": f"data:image/png;base64,{PNG}"}},
    "input_audio": {"input_audio": {"data": PNG, "format": "wav"}},
    "file": {"file": {"file_data": PNG, "filename": "a.pdf"}},
    "compaction": {"encrypted_content": "gAAAAA"},
    "compaction_summary": {"encrypted_content": "gAAAAA"},
    "context_compaction": {"encrypted_content": "gAAAAA"},
}


def sample(kind: str) -> dict[str, Any]:
    known = SAMPLES.get(kind)
    if known is None and kind.endswith("_output"):
        known = {"call_id": "c", "output": WORD}
    return {"type": kind, **(known or {"text": WORD, "refusal": WORD, "name": WORD, "id": "i"})}


ITEMS = [kind for kind in RESPONSES_ITEMS if kind not in ("item_reference", "compaction_trigger")]


@pytest.mark.parametrize("kind", ITEMS)
def test_item_of_responses_has_its_outcome(kind: str) -> None:
    asked = {"role": "user", "content": "hi"}
    call = parsed("responses", {"input": [asked, sample(kind), asked]})
    assert fate(call, WORD) is RESPONSES_ITEMS[kind]


@pytest.mark.parametrize("kind", RESPONSES_CONTENT)
@pytest.mark.parametrize("place", ["message", "output"])
def test_content_of_responses_has_its_outcome(kind: str, place: str) -> None:
    part = {"type": kind, "text": WORD, "refusal": WORD, "image_url": "https://x/a.png"}
    item: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": [part]}
    if place == "message":
        item = {"role": "user", "content": [part]}
    assert fate(parsed("responses", {"input": [item]}), WORD) is RESPONSES_CONTENT[kind]


OF_ASSISTANT = ("tool_use", "thinking", "redacted_thinking", "compaction")
IN_RESULT = ("tool_reference",)


def places(kind: str) -> tuple[str, ...]:
    if kind in OF_ASSISTANT:
        return ("assistant",)
    if kind in IN_RESULT:
        return ("result",)
    return ("user",) if kind == "tool_result" else ("user", "assistant", "result")


@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for kind in MESSAGES_BLOCKS for place in places(kind)]
)
def test_block_of_messages_has_its_outcome(kind: str, place: str) -> None:
    block = sample(kind)
    if place == "result":
        block = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant" if place == "assistant" else "user", "content": [block]},
        {"role": "user", "content": "go on"},
    ]
    call = parsed("messages", {"max_tokens": 5, "messages": messages})
    assert fate(call, WORD) is MESSAGES_BLOCKS[kind]


@pytest.mark.parametrize("kind", CHAT_CONTENT)
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_part_of_chat_has_its_outcome(kind: str, role: str) -> None:
    if kind == "thinking" and role != "assistant":
        return
    message = {"role": role, "content": [sample(kind)], "tool_call_id": "c"}
    asked = {"role": "user", "content": "hi"}
    call = parsed("chat/completions", {"messages": [asked, message, asked]})
    assert fate(call, WORD) is CHAT_CONTENT[kind]


FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("route", "kind", "expected"),
    [
        *(("responses", kind, fate) for kind, fate in RESPONSES_TOOLS.items()),
        *(("messages", kind, fate) for kind, fate in MESSAGES_TOOLS.items()),
        *(("chat/completions", kind, fate) for kind, fate in CHAT_TOOLS.items()),
        ("chat/completions", "web_search", Fate.LEFT_OUT),
    ],
)
def test_tool_has_its_outcome_and_alone_is_refused_if_it_is_left_out(
    route: str, kind: str, expected: Fate
) -> None:
    tool: dict[str, Any] = {"type": kind, "name": WORD, "tools": [FUNCTION], "input_schema": {}}
    tool |= {"custom": {"name": WORD}, "function": {"name": WORD}}
    other = {**FUNCTION, "function": {"name": "f"}, "input_schema": {}}
    if route == "messages":
        other["type"] = "custom"
    body = {"max_tokens": 5, "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    call = parsed(route, {**body, "tools": [other, tool]})
    if expected is Fate.FUNCTION:
        assert len(call.conversation.tools) == 2
        assert not call.notes
        assert len(parsed(route, {**body, "tools": [tool]}).conversation.tools) == 1
        return
    assert [(note.kind, note.name) for note in call.notes] == [("tools_left_out", kind)]
    assert len(call.conversation.tools) == 1
    with pytest.raises(RequestError, match=kind):
        parsed(route, {**body, "tools": [tool]})


def test_same_block_gives_the_same_text_in_every_request() -> None:
    block = sample("image")
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    texts = [
        said(
            parsed("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [each]}]})
        )
        for each in (block, marked)
    ]
    assert texts[0] == texts[1]
    assert "image/png, 70 bytes" in texts[0]


def test_unknown_types_are_shown() -> None:
    item = {"type": "thing_of_2027", "payload": {"note": WORD}, "blob": PNG * 20}
    text = said(parsed("responses", {"input": [item]}))
    assert WORD in text
    assert PNG not in text
    block = {"type": "thing_of_2027", "text": WORD}
    assert WORD in said(
        parsed("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]})
    )
