"""What a request adds to its session's conversation, as the JSON that a `Turn` records.

A request is recorded as the messages after the last recorded answer that it repeats:

    {"after": 3, "messages": […]}                 messages(3) + answer(3) + these
    {"after": null, "tools": […], "messages": […]}  the whole conversation
    {"same_as": 3}                                another answer to the request of turn 3

Invariant: `load_conversation` returns the conversation that was sent, with recorded answers in the
place of the agent's copies of them (which have the same key; see `message_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.conversation.messages import Conversation, Message, ToolCall, load_answer
from proxy.records import ImageSpan, Turn


def dump_same_request(index: int) -> bytes:
    """For another answer to the request of turn `index`."""
    return orjson.dumps({"same_as": index})


def dump_request(conversation: Conversation, answered: int, after: int | None) -> bytes:
    """`answered` is the index of the last message that is a recorded answer (-1: none), and `after`
    the turn of that answer. Empty for a prompt without messages (Completions)."""
    if conversation.raw is not None:
        return b""
    new = [_fields(message) for message in conversation.messages[answered + 1 :]]
    if after is not None:
        return orjson.dumps({"after": after, "messages": new})
    return orjson.dumps({"after": None, "tools": conversation.tools, "messages": new})


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """What a turn has recorded of its request: one of the three forms above."""

    messages: list[Message]
    after: int | None
    """The turn whose answer comes before `messages`."""
    tools: list[dict[str, Any]]
    """Empty with `after`, because they are those of the first request of the conversation."""
    same_as: int | None = None


def load_request(turn: Turn) -> RecordedRequest | None:
    """None if it was not recorded: see `load_conversation`."""
    return parse_request(turn.request)


def parse_request(recorded: bytes) -> RecordedRequest | None:
    """See `load_request`. `recorded` is a turn's `request`."""
    if not recorded:
        return None
    fields = orjson.loads(recorded)
    if "same_as" in fields:
        return RecordedRequest([], None, [], fields["same_as"])
    messages = [load_message(each) for each in fields["messages"]]
    return RecordedRequest(messages, fields["after"], fields.get("tools", []))


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """The conversation that a turn answers."""

    conversation: Conversation
    answers: Mapping[int, int]
    """Index of a message that is a recorded answer → its turn."""


def load_conversation(
    turns: Sequence[Turn] | Mapping[int, Turn], index: int
) -> RecordedConversation | None:
    """The conversation that turn `index` answers. None if it was not recorded: a prompt without
    messages, or a turn of a version that did not record them."""
    parts: list[list[tuple[Message, int | None]]] = []
    while (request := load_request(turns[index])) is not None:
        if request.same_as is not None:
            index = request.same_as
            continue
        parts.append([(message, None) for message in request.messages])
        if request.after is None:
            found = [message for part in reversed(parts) for message in part]
            answers = {at: turn for at, (_, turn) in enumerate(found) if turn is not None}
            messages = [message for message, _ in found]
            conversation = Conversation(messages, request.tools, images=_images_of(turns))
            return RecordedConversation(conversation, answers)
        index = request.after
        parts.append([(load_answer(turns[index].answer), index)])
    return None


def _images_of(turns: Sequence[Turn] | Mapping[int, Turn]) -> dict[str, ImageSpan]:
    every = turns.values() if isinstance(turns, Mapping) else turns
    return {image.sha256: image for turn in every for image in turn.images}


def continued_turn(turns: Sequence[Turn], index: int) -> int | None:
    """The turn whose answer is the last recorded one in the conversation that `index` answers."""
    while (request := load_request(turns[index])) is not None:
        if request.same_as is None:
            return request.after
        index = request.same_as
    return None


def _fields(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    fields = {"role": message.role, "text": message.text, "reasoning": message.reasoning}
    return {**fields, "tool_calls": calls, "tool_call_id": message.tool_call_id}


def load_message(fields: dict[str, Any]) -> Message:
    """A message of a recorded request."""
    calls = [ToolCall(**call) for call in fields.pop("tool_calls")]
    return Message(**fields, tool_calls=calls)
