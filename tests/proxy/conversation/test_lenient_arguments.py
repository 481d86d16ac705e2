"""Arguments with line breaks as they are in a string, which models write."""

from __future__ import annotations

import pytest

from proxy.conversation import Conversation
from proxy.conversation.json_values import read_arguments
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
    ],
)
def test_line_breaks_in_strings_are_read_and_nothing_else(text: str, value: object) -> None:
    assert read_arguments(text) == value


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
