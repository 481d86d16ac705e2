"""The pieces in which an answer leaves while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.conversation import ToolCall


@dataclass(slots=True)
class TextDelta:
    text: str


@dataclass(slots=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ArgumentsDelta:
    index: int
    """Of a call that has started."""
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def tell_calls(sent: list[ToolCall], calls: Sequence[ToolCall], out: list[Delta]) -> None:
    """Tells what `calls` have beyond `sent`, and makes it sent; what was sent stands."""
    for index, call in enumerate(calls):
        if index == len(sent):
            sent.append(ToolCall(call.id, call.name, ""))
            out.append(ToolCallStart(index, call.id, call.name))
        told = sent[index]
        rest = call.arguments[len(told.arguments) :]
        if rest and call.arguments.startswith(told.arguments):
            out.append(ArgumentsDelta(index, rest))
            told.arguments = call.arguments
