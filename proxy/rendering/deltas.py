"""The pieces in which an answer leaves while it is sampled."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.conversation import ToolCall


@dataclass(slots=True)
class TextDelta:
    text: str


@dataclass(slots=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True)
class ToolCallDelta:
    index: int
    call: ToolCall
    """Whole: a call leaves when it has ended."""


Delta = TextDelta | ReasoningDelta | ToolCallDelta
