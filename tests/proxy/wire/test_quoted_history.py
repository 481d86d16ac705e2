"""What an agent quotes from its history in an odd form is understood or shown, never refused."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import RequestError
from proxy.wire.fields import Fields
from proxy.wire.registry import open_dialects

GO = {"role": "user", "content": "Go."}
CODE = {"type": "code_execution_20250825", "name": "code_execution"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def used(block: Any, result: Any) -> dict[str, Any]:
    """A request whose history has a use of a tool and its result."""
    answer = {"role": "assistant", "content": [block, *([result] if result else [])]}
    return {"messages": [GO, answer, GO], "max_tokens": 9, "tools": [CODE, SEARCH]}


def executed(content: Any) -> dict[str, Any]:
    use = {"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {"code": "1"}}
    kind = "code_execution_tool_result"
    return used(use, {"type": kind, "tool_use_id": "s", "content": content})


def searched(content: Any) -> dict[str, Any]:
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "1"}}
    return used(use, {"type": "web_search_tool_result", "tool_use_id": "s", "content": content})


def quoting(*items: Any) -> dict[str, Any]:
    tools = [{"type": "code_interpreter", "container": "c"}, {"type": "web_search"}]
    return {"input": [GO, *items, GO], "tools": tools}


OUTPUT = '{"stdout":"%s","stderr":"","return_code":0}'


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (executed(None), "code execution is unavailable"),
        (executed([]), "code execution is unavailable"),
        (executed({"error_code": ["x"]}), "code execution is unavailable"),
        (executed({"error_code": "execution_time_exceeded"}), "the code took too long"),
        (executed({"stdout": "a", "stderr": 1, "return_code": "0"}), OUTPUT % "a"),
        (executed({"stdout": ["a"], "return_code": 2**80}), OUTPUT % ""),
        (searched(None), "web_search is unavailable"),
        (searched([{"title": 1, "url": None, "encrypted_content": 3}, "x"]),
         '[{"title":"","url":"","text":""}]'),
        (quoting({"type": "code_interpreter_call", "id": 3, "code": 4}), ""),
        (quoting({"type": "code_interpreter_call", "id": "ci_9_z", "outputs": ["x"]}), ""),
        (quoting({"type": "code_interpreter_call", "outputs": [{"logs": 5}]}), ""),
        (quoting({"type": "web_search_call", "id": 3, "action": "x"}), ""),
    ],
)  # fmt: skip
def test_odd_results_of_a_providers_tools_are_results(body: Any, text: str) -> None:
    """A history that a request only quotes is not refused."""
    dialect = open_dialects()["messages" if "messages" in body else "responses"]
    call = Fields({**body, "model": "m"})
    call.backends = frozenset(["code_execution", "web_search"])
    messages = dialect.parse(call, {}).conversation.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "user"]
    assert len(messages[1].tool_calls) == 1
    assert messages[2].text == text


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"command": "ls', '{"command": "ls'),
        (["ls"], '["ls"]'),
        (None, "{}"),
        ({"command": "ls"}, '{"command":"ls"}'),
    ],
)
def test_input_that_is_no_object_is_what_the_model_wrote(given: Any, arguments: str) -> None:
    use = {"type": "tool_use", "id": "a", "name": "shell", "input": given}
    body = {**used(use, None), "model": "m", "tools": [{"name": "shell", "input_schema": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"text": "No type."}]}
    body["messages"][-1] = {"role": "user", "content": [result]}
    messages = open_dialects()["messages"].parse(Fields(body), {}).conversation.messages
    assert messages[1].tool_calls[0].arguments == arguments
    assert messages[2].text == "No type."


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("messages", {"messages": [GO], "tools": [{"name": ["x"], "input_schema": {}}]}),
        ("messages", {"messages": [GO], "tools": [{"type": ["x"], "name": "x"}]}),
        ("responses", {"input": "Go.", "tools": [{"type": "function", "name": {"a": 1}}]}),
        ("responses", {"input": "Go.", "tools": [{"type": "function", "name": "x"}],
                       "tool_choice": {"type": "allowed_tools", "tools": [{"name": ["x"]}]}}),
        ("responses", {"input": "Go.", "tool_choice": {"type": ["function"]}}),
    ],
)  # fmt: skip
def test_name_that_is_no_text_is_refused(dialect: str, body: Any) -> None:
    with pytest.raises(RequestError, match="expected"):
        open_dialects()[dialect].parse(Fields({**body, "model": "m"}), {})
