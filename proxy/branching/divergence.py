"""Describes how a request differs from the recorded one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from proxy.conversation.images import told_apart, uncut
from proxy.conversation.json_values import canonical_arguments
from proxy.conversation.messages import Message

CONTEXT_LINES = 2
MAX_DIFF_CHARS = 4000
MAX_LINE_CHARS = 300
MAX_TEXT_CHARS = 50_000
"""Characters of each message that are compared line by line, which takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """Example: RequestDifference(turn=3, message=5, summary="recorded '2 files', got '3 files'",
    diff="--- recorded\\n+++ this branch\\n…")"""

    turn: int
    """The recorded turn that was expected."""
    message: int | None
    """Index of the first message that differs; None for the tools, or for a prompt without
    messages."""
    summary: str
    diff: str

    @property
    def text(self) -> str:
        """One line for the agent's error."""
        place = "the tools differ" if self.message is None else f"message {self.message} differs"
        return f"at the recorded turn {self.turn}, {place}: {self.summary}"


def difference(turn: int, message: int | None, recorded: str, seen: str) -> RequestDifference:
    """The divergence of two texts that differ, as a unified diff of their lines."""
    shorter = (told_apart(text[: uncut(text, MAX_TEXT_CHARS)]) for text in (recorded, seen))
    before, after = (text.splitlines() for text in shorter)
    found = list(
        difflib.unified_diff(before, after, "recorded", "this branch", n=CONTEXT_LINES, lineterm="")
    )
    shown = "\n".join(line[:MAX_LINE_CHARS] for line in found)
    removed, added = (
        next((line[1:] for line in found[2:] if line.startswith(mark)), "") for mark in "-+"
    )
    summary = f"recorded {removed[:100]!r}, got {added[:100]!r}"
    return RequestDifference(turn, message, summary, shown[:MAX_DIFF_CHARS])


def message_text(message: Message) -> str:
    """A message as lines of text, in one form for equal messages."""
    calls = [
        f"{call.name} {canonical_arguments(call.arguments).decode()}" for call in message.tool_calls
    ]
    text = message.text.strip() if message.role == "assistant" else message.text
    return "\n".join([f"[{message.role}]", *([text] if text else []), *calls])
