"""The pieces in which an answer is sent while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.conversation.messages import ToolCall, own_call_id


class TextDelta(msgspec.Struct, gc=False):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, gc=False):
    """More of the answer's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, gc=False):
    """A tool call begins. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, gc=False):
    """More of the JSON text of a tool call's arguments."""

    index: int
    """Of a call that has started."""
    text: str


class ResultDelta(msgspec.Struct, gc=False):
    """The result of a call that the proxy runs itself, after the answer that made the call."""

    call: ToolCall
    text: str
    """What the model sees."""


Delta = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta | ResultDelta


def send_calls(sent: list[ToolCall], calls: Sequence[ToolCall], out: list[Delta]) -> None:
    """Appends the part of `calls` that is not in `sent` to `out`, and updates `sent`.

    What was sent is never changed. A call without an id gets one when it is first sent.
    """
    for index, call in enumerate(calls):
        if index == len(sent):
            call_id = own_call_id(call.id, sent)
            sent.append(ToolCall(call_id, call.name, ""))
            out.append(ToolCallStart(index, call_id, call.name))
        known = sent[index]
        rest = call.arguments[len(known.arguments) :]
        if rest and call.arguments.startswith(known.arguments):
            out.append(ArgumentsDelta(index, rest))
            known.arguments = call.arguments
