"""Half a surrogate pair, which JavaScript can write, and a byte order mark do not end a trial."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.json_values import canonical_arguments, loads, parsed_arguments
from tests.proxy.conftest import RunningProxy

HALF = "\ud83d"
PIECES = st.sampled_from(
    ["\\ud83d", "\\uDE00", "\\\\", "\\u00e9", "a", '\\"', "\\n", "\\uD83D\\uDE00", "udc00", "u"]
)


def replaced(value: str) -> str:
    """As the `toWellFormed` of JavaScript."""
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.lists(PIECES, max_size=9))
def test_escapes_are_read_as_javascript_reads_them(pieces: list[str]) -> None:
    text = '"' + "".join(pieces) + '"'
    assert loads(text) == loads(text.encode()) == replaced(json.loads(text))


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        ('{"a": "x\ud83dy"}'.encode("utf-8", "surrogatepass"), {"a": "x\ufffdy"}),
        ('{"a": "\ud83d\ude00"}'.encode("utf-8", "surrogatepass"), {"a": "\U0001f600"}),
        (b'{"a": "\xc3"}', {"a": "\ufffd"}),
        (b'{"\\udc00": 1}', {"\ufffd": 1}),
    ],
)
def test_bytes_that_are_not_utf_8_are_read(data: bytes, value: Any) -> None:
    assert loads(data) == value


@pytest.mark.parametrize("text", ["{", '{"a": \\ud83d}', '{"\\ud83d": }', "\ufeff", ""])
def test_what_is_not_json_is_still_refused(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text.encode())


def test_arguments_with_half_a_pair_are_an_object() -> None:
    assert parsed_arguments('{"a": "\\ud83d"}') == {"a": "\ufffd"}
    assert canonical_arguments('{"a": "\\ud83d"}') == canonical_arguments('{"a": "\ufffd"}')


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
async def test_history_with_half_an_emoji_continues(proxy: RunningProxy, begin: bytes) -> None:
    """The model has written it in an argument, and a tool in its output."""
    proxy.answers('<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d"}}\n</tool_call>')
    session = await proxy.session()
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for _ in range(3):
        body = begin + json.dumps({"messages": messages, "tools": tools}).encode()
        status, reply = await proxy.post(session, "chat/completions", body)
        assert status == 200, reply
        message = reply["choices"][0]["message"]
        made = message["tool_calls"][0]
        arguments = json.loads(made["function"]["arguments"])  # with half a pair
        made["function"]["arguments"] = json.dumps(arguments)
        result = {"role": "tool", "tool_call_id": made["id"], "content": HALF}
        messages += [message, result]
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None] * 3
