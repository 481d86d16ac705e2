"""Conversations and messages, independent of the dialect.

Every dialect parses its request into a `Conversation` and writes its answer from an assistant
`Message`. `normalised` undoes changes that agents make to the form of their history but not to its
content, so that all later code gets one form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal

import msgspec
import orjson

from proxy.conversation.json_values import read_arguments
from proxy.records import ImageSpan

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, gc=False):
    """Example: ToolCall(id="call_3f…", name="shell", arguments='{"cmd": "ls"}')"""

    id: str
    name: str
    arguments: str
    """JSON text as the model or the agent wrote it, possibly invalid. Calls are compared by its
    parsed value."""


class Message(msgspec.Struct, gc=False):
    """Example: Message("tool", "3 files", tool_call_id="call_3f…")

    A struct, which is made in C, because each request brings the whole history again.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """For a tool result: the id of its call."""
    compacted: bool = False
    """Whether it stands for an earlier part of the conversation."""


class Conversation(msgspec.Struct):
    """Example: Conversation([Message("system", "Be brief."), Message("user", "Hello.")])"""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    """In the form of Chat Completions: `{"type": "function", "function": {"name", …}}`."""
    deferred: list[dict[str, Any]] = []
    """Tools that can be called and that are not in the prompt: the model learns of them from a tool
    result."""
    continues: int | None = None
    """The turn that `messages` follow, if the agent names it instead of repeating its history."""
    prefill: str | None = None
    """Text by the agent that the answer begins with and the model continues."""
    raw: str | list[int] | None = None
    """A prompt without messages, as text or ids (Completions)."""
    images: dict[str, ImageSpan] = {}
    """By sha256 what is known of the images in the messages (`conversation.images`), without their
    places."""

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools whose calls are read: those of the prompt, and the deferred ones."""
        return [*self.tools, *self.deferred] if self.deferred else self.tools


def message_chars(message: Message) -> int:
    """Number of characters of text, reasoning and arguments."""
    arguments = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning or "") + arguments


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """The arguments as the object that some dialects require.

    Arguments that are not a JSON object are returned as `{"arguments": value}`.
    """
    arguments = read_arguments(call.arguments)
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def normalised(messages: Sequence[Message]) -> list[Message]:
    """The conversation with one assistant message per answer.

    - Adjacent assistant messages are joined: some agents split an answer with several calls.
    - `call, result, call, result` of one answer becomes `calls, results`, and `calls, results` of
      several answers becomes `call, result, call, result`. The ids that the proxy gives to the
      calls of one answer show which belong together.
    - An answer that was cut after its reasoning is removed if the agent retried: at the end of the
      conversation, and before the answer that replaced it.
    """
    out: list[Message] = []
    for message in _apart(messages):
        if message.role != "assistant" or (before := _same_answer(out, message)) is None:
            out.append(message)
        else:
            out[before] = _joined(out[before], message)
    if len(out) > 1 and _is_only_reasoning(out[-1]):
        out.pop()
    return out


def split_reasoning(message: Message) -> tuple[str, str]:
    """An answer's reasoning and text, each without surrounding white space.

    Some agents return the reasoning as `<think>…</think>` at the beginning of the text.
    """
    text, reasoning = message.text.strip(), (message.reasoning or "").strip()
    if not reasoning and text.startswith(_THINK) and _END_THINK in text:
        reasoning, _, text = text.removeprefix(_THINK).partition(_END_THINK)
    return reasoning.strip(), text.strip()


def new_call_id(answer: Sequence[ToolCall] = ()) -> str:
    """An id for the call that follows those in `answer`; ids of one answer have the same beginning.

    Example: `call_` + 20 random hexadecimal digits + `0002` for the third call.
    """
    groups = (_CALL_ID.fullmatch(call.id) for call in answer)
    group = next((found["group"] for found in groups if found), None)
    return f"{group or 'call_' + os.urandom(_GROUP_DIGITS // 2).hex()}{len(answer):04x}"


def own_call_id(call_id: str, answer: Sequence[ToolCall]) -> str:
    """The id of the call that follows those in `answer`: the model's own id, or a new one."""
    ours = _CALL_ID.fullmatch(call_id)
    if call_id and (ours is None or not answer):
        return call_id
    return new_call_id(answer)


def missing_call_id(calls: Sequence[ToolCall]) -> str | None:
    """The id of the first call of an answer that is not among these; None if the proxy has not
    given them their ids."""
    found = [_CALL_ID.fullmatch(call.id) for call in calls]
    groups = {each and each["group"] for each in found}
    if len(groups) != 1 or None in groups:
        return None
    known, (group,) = {call.id for call in calls}, groups
    return next(each for n in count() if (each := f"{group}{n:04x}") not in known)


def dump_answer(message: Message) -> bytes:
    """The JSON that a `Turn` records as its `answer`."""
    return orjson.dumps(
        {
            "text": message.text,
            "reasoning": message.reasoning,
            "tool_calls": [
                {"id": call.id, "name": call.name, "arguments": call.arguments}
                for call in message.tool_calls
            ],
        }
    )


def load_answer(data: bytes) -> Message:
    """The assistant message of a recorded turn's `answer`."""
    fields = orjson.loads(data)
    return Message(
        "assistant",
        fields["text"],
        fields["reasoning"],
        [ToolCall(call["id"], call["name"], call["arguments"]) for call in fields["tool_calls"]],
    )


_THINK, _END_THINK = "<think>", "</think>"
_GROUP_DIGITS = 20
_CALL_ID = re.compile(rf"(?P<group>call_[0-9a-f]{{{_GROUP_DIGITS}}})[0-9a-f]{{4}}")


def _same_answer(messages: list[Message], message: Message) -> int | None:
    """Index of the message that `message` continues as part of the same answer."""
    last = len(messages) - 1
    if messages and messages[-1].role == "assistant":
        return last
    if not message.tool_calls or message.text or message.reasoning:
        return None
    while last >= 0 and messages[last].role == "tool":
        last -= 1
    if last < 0 or last == len(messages) - 1 or messages[last].role != "assistant":
        return None
    groups = {_call_group(call) for call in (*messages[last].tool_calls, *message.tool_calls)}
    return last if len(groups) == 1 and None not in groups else None


def _apart(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with the calls of each answer and their results before those of the next one.
    Each of these answers has the message's reasoning: Goose joins answers that have the same."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        answers = _answers_in(message)
        if len(answers) < 2:
            yield message
            continue
        ends = next((n for n in range(at, len(messages)) if messages[n].role != "tool"), None)
        results, at = list(messages[at:ends]), len(messages) if ends is None else ends
        for number, calls in enumerate(answers):
            text = "" if number else message.text
            yield Message("assistant", text, message.reasoning, calls, compacted=message.compacted)
            ids = {call.id for call in calls}
            is_last = number == len(answers) - 1
            yield from (each for each in results if is_last or each.tool_call_id in ids)
            results = [each for each in results if each.tool_call_id not in ids]


def _answers_in(message: Message) -> list[list[ToolCall]]:
    """The calls of a message by the answer that they are of; one answer if that is not known."""
    if len(message.tool_calls) < 2:
        return [message.tool_calls]
    answers: dict[str | None, list[ToolCall]] = {}
    for call in message.tool_calls:
        answers.setdefault(_call_group(call), []).append(call)
    return [message.tool_calls] if None in answers else list(answers.values())


def _call_group(call: ToolCall) -> str | None:
    found = _CALL_ID.fullmatch(call.id)
    return found["group"] if found else None


def _is_only_reasoning(message: Message) -> bool:
    if message.role != "assistant" or message.text or message.tool_calls:
        return False
    return bool(message.reasoning)


def _joined(first: Message, second: Message) -> Message:
    texts = [message.text for message in (first, second) if message.text]
    reasoning = [message.reasoning for message in (first, second) if message.reasoning]
    if len(reasoning) == 2 and _is_only_reasoning(first):
        reasoning = reasoning[1:]
    calls = [*first.tool_calls, *second.tool_calls]
    if missing_call_id(calls) is not None:
        calls.sort(key=lambda call: call.id)
    compacted = first.compacted or second.compacted
    reasoned = "\n".join(reasoning) or None
    return Message("assistant", "\n".join(texts), reasoned, calls, compacted=compacted)
