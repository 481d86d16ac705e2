"""Equal conversations have equal keys in every process and every release."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.json_values import MAX_ARGUMENT_DEPTH, canonical_arguments, parsed_arguments
from proxy.conversation.message_keys import (
    ConversationKey,
    RawKey,
    conversation_keys,
    key_from_stored,
    message_digest,
    raw_key,
)
from proxy.conversation.messages import Conversation, Message, ToolCall

CONVERSATION = Conversation(
    [
        Message("system", "Be brief."),
        Message("user", "List the files."),
        Message("assistant", " Look. ", "Hm.", [ToolCall("c", "shell", '{"cmd": "ls", "n": 1}')]),
        Message("tool", "a b", tool_call_id="c"),
    ],
    [{"type": "function", "function": {"name": "shell", "parameters": {}}}],
)
FIRST_RELEASE = {
    "keep": "16cacc05383e0aa650bd65f2e9239e3d1bc1e87d8ff696ffec768eeb746f5570"
    "96aea951d0234c9e859110a1045103f9",
    "follow": "3244bc9d16eb2451af8821408dd4e0671bc1e87d8ff696ffec768eeb746f5570"
    "0b63324de4ec759df7e32ba36bcf012a",
    "answered": "244b0b395b7a36a9ef5fe814141e3ac91bc1e87d8ff696ffec768eeb746f5570"
    "92e40e5468213993e578637ac6ba191c",
    "raw": "ccaa6848f464ee2523d1bf985873127c0400000000000000"
    "7261772d7465787400000000000000000000000000000000",
}
"""Keys in the form that the first release stored."""


def test_keys_equal_those_in_existing_databases() -> None:
    key = conversation_keys(CONVERSATION)[-1]
    stored: dict[str, ConversationKey | RawKey] = {
        "keep": key,
        "follow": conversation_keys(CONVERSATION, with_reasoning=True)[-1],
        "answered": key.answered(Message("assistant", "Done.")),
        "raw": raw_key("Once"),
    }
    assert {name: key.stored().hex() for name, key in stored.items()} == FIRST_RELEASE


digests = st.binary(min_size=16, max_size=16)
keys = st.builds(
    ConversationKey,
    digests,
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=8, max_size=8).filter(lambda digest: digest != b"raw-text"),
    digests,
) | st.builds(RawKey, digests, st.integers(0, 2**63))


@given(keys)
def test_stored_key_is_read_back_unchanged(key: ConversationKey | RawKey) -> None:
    assert key_from_stored(key.stored()) == key
    assert type(key_from_stored(key.stored())) is type(key)


def test_bytes_of_another_length_are_not_a_stored_key() -> None:
    with pytest.raises(ValueError, match="48 bytes, got 3"):
        key_from_stored(b"abc")


def javascript(value: Any) -> Any:
    """The result of JavaScript's JSON.parse and JSON.stringify for a JSON value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, dict):
            return {key: javascript(inner) for key, inner in value.items()}
        return [javascript(inner) for inner in value] if isinstance(value, list) else value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


numbers = (
    st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1.0, -0.0, 1e3, 1e21, 2.0**53 + 2, 2**53 + 1, 10**30, 5e-324])
)
values = st.recursive(
    numbers | st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_arguments_reserialised_by_javascript_are_equal(arguments: dict[str, Any]) -> None:
    sent = json.dumps(arguments)
    returned = json.dumps(javascript(arguments))
    assert canonical_arguments(returned) == canonical_arguments(sent)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.0", "1"),
        ("1e3", "1000"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("9007199254740993", "9007199254740992"),
        ("123456789012345678901", "123456789012345680000"),
        ("1E-7", "0.0000001"),
        ("1e21", "1000000000000000000000"),
    ],
)
def test_different_notations_of_a_number_are_equal(one: str, other: str) -> None:
    assert canonical_arguments(f'{{"n": [{one}]}}') == canonical_arguments(f'{{"n":[{other}]}}')


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "true"), ("0", "false"), ("1", '"1"'), ("1", "1.5"), ("0", "null"),
     ("9007199254740991", "9007199254740990")],
)  # fmt: skip
def test_different_values_are_not_equal(one: str, other: str) -> None:
    assert canonical_arguments(f'{{"n": {one}}}') != canonical_arguments(f'{{"n": {other}}}')


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "NaN", "1e999", '"a"'])
def test_arguments_that_are_not_an_object_are_compared_by_value(text: str) -> None:
    shown = orjson.dumps({"arguments": parsed_arguments(text)} if text else {}).decode()
    assert canonical_arguments(text) == canonical_arguments(shown)


@pytest.mark.parametrize("levels", [MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_DEPTH + 1, 300, 5000])
def test_arguments_of_any_depth_can_be_compared_and_serialised(levels: int) -> None:
    text = '{"a":' * levels + "1" + "}" * levels
    assert canonical_arguments(text) == canonical_arguments(text)
    orjson.dumps({"input": parsed_arguments(text)})
    assert isinstance(parsed_arguments(text), str) == (levels > MAX_ARGUMENT_DEPTH)


def test_reasoning_inside_the_text_is_recognised() -> None:
    split = Message("assistant", "Look.", "Hm.")
    inline = Message("assistant", "<think>\nHm.\n</think>\n\nLook.")
    for with_reasoning in (False, True):
        assert message_digest(inline, [], with_reasoning=with_reasoning) == message_digest(
            split, [], with_reasoning=with_reasoning
        )
    other = Message("assistant", "<think>\nOh.\n</think>\n\nLook.")
    assert message_digest(other, [], with_reasoning=True) != message_digest(
        split, [], with_reasoning=True
    )


def test_numbers_keep_their_sign_and_size() -> None:
    assert canonical_arguments('{"n": -1}') != canonical_arguments('{"n": 1}')
    assert math.copysign(1, orjson.loads(canonical_arguments('{"n": -0.0}'))["n"]) == 1
