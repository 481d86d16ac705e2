"""Arguments with line breaks as they are in a string, which models write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.conversation import Conversation
from proxy.conversation.json_values import canonical_arguments, read_arguments
from proxy.conversation.messages import Message, ToolCall, arguments_object
from proxy.conversation.references import AnswerPart, ReferringConversation


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"command": "a\nb\tc"}', {"command": "a\nb\tc"}),
        ('{"command": "a\\nb"}', {"command": "a\nb"}),
        ('{"n": NaN,\n "a": "\n"}', '{"n": NaN,\n "a": "\n"}'),
        ("[" * 200 + '"\n"' + "]" * 200, "[" * 200 + '"\n"' + "]" * 200),
        ("{broken\n", "{broken\n"),
        ("", {}),
        (
            '{"a": "\n\\ud800", "n": 123456789012345678901234}',
            {"a": "\n\ufffd", "n": 1.2345678901234568e23},
        ),
        ('{"a": "\n", "n": 1e999}', '{"a": "\n", "n": 1e999}'),
        ('{"a\n": "\\"\n\\\\"}\n', {"a\n": '"\n\\'}),
        ('{"a": "\n\\', '{"a": "\n\\'),
        ('{"a": "\\\n"}', '{"a": "\\\n"}'),
    ],
)
def test_line_breaks_in_strings_are_read_and_nothing_else(text: str, value: object) -> None:
    assert read_arguments(text) == value


@given(
    st.dictionaries(
        st.text(),
        st.one_of(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.integers()),
    )
)
@settings(deadline=None)
def test_arguments_are_equal_to_what_a_lenient_agent_makes_of_them(
    value: dict[str, object],
) -> None:
    written = json.dumps(value, ensure_ascii=False)
    raw = written.replace("\\n", "\n").replace("\\t", "\t")
    try:
        again = json.dumps(json.loads(raw, strict=False))
    except ValueError:  # the backslash was one of two
        return
    assert canonical_arguments(raw) == canonical_arguments(again)


def test_a_long_string_that_never_ends_is_read_once() -> None:
    """A search that began at each quote would take hours."""
    text = '{"a": "\n' + '\\"' * 400_000
    assert read_arguments(text) == text


def test_a_dialect_that_needs_an_object_gets_it() -> None:
    call = ToolCall("c", "Bash", '{"command": "a\nb"}')
    assert arguments_object(call) == {"command": "a\nb"}


def test_text_on_both_sides_of_a_call_is_referred_to_twice_and_is_there_once() -> None:
    call = ToolCall("call_1", "Bash", "{}")
    answer = Message("assistant", "Let me look.", None, [call])
    items: list[Message | AnswerPart] = [
        Message("user", "Go."),
        AnswerPart("msg_0", turn=0, part="text"),
        AnswerPart("fc_0_0_call_1", turn=0, part="call", call=0, call_id="call_1"),
        AnswerPart("msg_0", turn=0, part="text"),
    ]
    asked = ReferringConversation(Conversation([], []), items)
    asked.resolve({0: answer})
    assert asked.conversation.messages[1:] == [answer]
