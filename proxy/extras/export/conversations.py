"""A session's conversations: one per answer that no other turn continues.

Invariant: over all conversations of a session, `sampled` names each answered turn whose request was
recorded once: in the first conversation that contains its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.conversation.images import parts
from proxy.conversation.messages import Message, load_answer
from proxy.conversation.recorded import continued_turn, load_conversation
from proxy.extras.export.images import READ_BY
from proxy.extras.export.protocol import Row
from proxy.records import Turn, TurnStatus


@dataclass(frozen=True, slots=True)
class ConversationPath:
    """Example: ConversationPath([Message("user", "Hi."), Message("assistant", "5")], [], {1: 0},
    frozenset({1}))"""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answers: Mapping[int, int]
    """Index of a message that the policy sampled → its turn."""
    sampled: frozenset[int]
    """Indices of the sampled messages that no earlier conversation of the session contains."""


def conversation_paths(turns: Sequence[Turn]) -> Iterator[ConversationPath]:
    """The conversations of the answered turns whose requests were recorded, in the order of their
    last answers."""
    answered = [t.index for t in turns if t.status is TurnStatus.DONE and t.answer and t.request]
    continued = {continued_turn(turns, index) for index in answered}
    claimed: set[int] = set()
    for index in answered:
        if index in continued or (recorded := load_conversation(turns, index)) is None:
            continue
        messages = [*recorded.conversation.messages, load_answer(turns[index].answer)]
        answers = {
            at: turn
            for at, turn in {**recorded.answers, len(messages) - 1: index}.items()
            if turns[turn].status is TurnStatus.DONE
        }
        new = {at for at, turn in answers.items() if turn not in claimed}
        claimed.update(answers.values())
        yield ConversationPath(messages, recorded.conversation.tools, answers, frozenset(new))


def chat_message(message: Message, *, as_parts: bool = False) -> Row:
    """The message in the form of Chat Completions. Keys without a value are None, so that the rows
    of a table have equal columns.

    Args:
        as_parts: the content is a list of parts, `{"type": "text", "text": …}` and
            `{"type": "image"}`, as of a model that reads images.
    """
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": content_parts(message) if as_parts else message.text,
        "reasoning_content": message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }


def content_parts(message: Message) -> list[Row]:
    """The texts and the images of a message, in order."""
    found = parts(message.text) if message.role in READ_BY else [(message.text, "")]
    out: list[Row] = []
    for text, sha256 in found:
        out += [{"type": "text", "text": text}] if text else []
        out += [{"type": "image"}] if sha256 else []
    return out


def message_columns(pa: Any, *, as_parts: bool = False) -> Any:
    """The Arrow type of a list of `chat_message`."""
    part = pa.struct({"type": pa.string(), "text": pa.string()})
    function = pa.struct({"name": pa.string(), "arguments": pa.string()})
    call = pa.struct({"id": pa.string(), "type": pa.string(), "function": function})
    return pa.list_(
        pa.struct(
            {
                "role": pa.string(),
                "content": pa.list_(part) if as_parts else pa.string(),
                "reasoning_content": pa.string(),
                "tool_calls": pa.list_(call),
                "tool_call_id": pa.string(),
            }
        )
    )
