"""A session's known keys are those that `conversation_keys` returns, and take bounded memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from proxy.conversation import message_keys as keys_module
from proxy.conversation.message_keys import (
    CONVERSATIONS,
    LIMIT_BYTES,
    MESSAGE_BYTES,
    MIN_MESSAGES,
    KnownKeys,
    conversation_keys,
    message_digest,
)
from proxy.conversation.messages import Conversation, Message, ToolCall

texts = st.sampled_from(["", " ", "a", "a ", "b", "<think>a</think>b"])
ids = st.sampled_from(["", "c1", "c2"])
calls = st.builds(
    ToolCall, ids, st.sampled_from(["f", "g"]), st.sampled_from(["{}", '{"n": 1}', '{"n": 1.0}'])
)
messages = st.one_of(
    st.builds(Message, st.just("system"), texts),
    st.builds(Message, st.just("user"), texts),
    st.builds(Message, st.just("assistant"), texts, st.none() | texts, st.lists(calls, max_size=2)),
    st.builds(Message, st.just("tool"), texts, tool_call_id=st.none() | ids),
)
tools = st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}]])


@st.composite
def edited(draw: st.DrawFn, history: list[Message]) -> list[Message]:
    """What an agent sends after `history`: all or part of it, one message changed, and new ones."""
    kept = history[: draw(st.just(len(history)) | st.integers(0, len(history)))]
    if draw(st.booleans()) and kept:
        at = draw(st.integers(0, len(kept) - 1))
        name = draw(st.sampled_from([field.name for field in fields(Message)]))
        changed = replace(kept[at], **{name: getattr(draw(messages), name)})
        kept = [*kept[:at], changed, *kept[at + 1 :]]
    return kept + draw(st.lists(messages, min_size=0 if kept else 1, max_size=6))


@given(st.data())
def test_keys_are_the_same_with_and_without_what_is_known(data: st.DataObject) -> None:
    """Also where a message differs in one field only from the one that is known."""
    known = KnownKeys()
    histories = [data.draw(st.lists(messages, min_size=MIN_MESSAGES, max_size=14))]
    for _ in range(8):
        sent = data.draw(edited(data.draw(st.sampled_from(histories))))
        histories.append(sent)
        conversation = Conversation(sent, data.draw(tools))
        follows = data.draw(st.booleans())
        expected = conversation_keys(conversation, with_reasoning=follows)
        assert known.keys(conversation, with_reasoning=follows) == expected


def long_conversation(size: int, name: str = "") -> Conversation:
    return Conversation([Message("user", f"{name} {number}") for number in range(size)])


def digests_made(known: KnownKeys, conversation: Conversation) -> int:
    with patch.object(keys_module, "message_digest", wraps=message_digest) as digest:
        known.keys(conversation)
    return digest.call_count


def test_a_request_is_keyed_for_the_messages_that_it_adds() -> None:
    known, conversation = KnownKeys(), long_conversation(100)
    assert digests_made(known, conversation) == 100
    conversation.messages += [Message("assistant", "Yes."), Message("user", "Go on.")]
    assert digests_made(known, conversation) == 2
    conversation.messages[50] = replace(conversation.messages[50], text="Changed.")
    assert digests_made(known, conversation) == 52


def test_conversations_that_take_turns_are_all_known() -> None:
    known = KnownKeys()
    conversations = [long_conversation(20, name) for name in "abcd"[:CONVERSATIONS]]
    assert [digests_made(known, one) for one in conversations] == [20] * CONVERSATIONS
    for one in conversations:
        one.messages.append(Message("user", "Go on."))
    assert [digests_made(known, one) for one in conversations] == [1] * CONVERSATIONS


@pytest.mark.parametrize("size", [50, 3 * LIMIT_BYTES // MESSAGE_BYTES])
def test_memory_is_bounded_and_given_back(size: int) -> None:
    known = KnownKeys()
    for number in range(CONVERSATIONS + 3):
        known.keys(long_conversation(size, str(number)))
        assert 0 < known.memory_bytes <= LIMIT_BYTES
    known.clear()
    assert known.memory_bytes == 0


def test_a_conversation_beyond_the_bound_is_known_up_to_it() -> None:
    known, most = KnownKeys(), LIMIT_BYTES // MESSAGE_BYTES
    conversation = long_conversation(most + 10)
    known.keys(conversation)
    assert digests_made(known, conversation) == 10
    assert known.keys(conversation) == conversation_keys(conversation)


def shell_conversation(**changed: Message) -> Conversation:
    """Example: shell_conversation(user=Message("user", "Other."))"""
    parts = {
        "system": Message("system", "Be brief."),
        "user": Message("user", "List the files."),
        "answer": Message(
            "assistant", "Look.", "Hm.", [ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}")]
        ),
        "first": Message("tool", "a", tool_call_id="c1"),
        "second": Message("tool", "b", tool_call_id="c2"),
    }
    more = [Message("user", str(number)) for number in range(MIN_MESSAGES)]
    return Conversation([*{**parts, **changed}.values(), *more])


@pytest.mark.parametrize(
    "changed",
    [
        {"system": Message("user", "Be brief.")},
        {"user": Message("user", "List the files!")},
        {"answer": replace(shell_conversation().messages[2], reasoning="Ha.")},
        {"answer": Message("assistant", "Look.", "Hm.", [ToolCall("c1", "f", "{}")])},
        {"answer": Message("assistant", "Look.", "Hm.", [ToolCall(i, "f", "{}") for i in "12"])},
        {"answer": Message("assistant", "Look.", "Hm.", [ToolCall("c1", "g", "{}")] * 2)},
        {"answer": Message("assistant", "Look.", "Hm.", [ToolCall("c1", "f", "[]")] * 2)},
        {"first": Message("tool", "a", tool_call_id="c2")},
        {"second": Message("tool", "b", tool_call_id=None)},
    ],
)
def test_a_change_of_any_field_is_noticed(changed: dict[str, Message]) -> None:
    known = KnownKeys()
    before, after = shell_conversation(), shell_conversation(**changed)
    expected = conversation_keys(after, with_reasoning=True)
    assert known.keys(before, with_reasoning=True) != expected
    assert known.keys(after, with_reasoning=True) == expected
