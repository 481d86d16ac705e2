"""System messages for chat templates that accept one at the beginning only, as Qwen3.5's does.

Claude Code and Codex send several, also in the middle and at the end of a conversation. Invariant:
a message is moved or renamed only for a template that refuses the conversation otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from msgspec import structs

from proxy.conversation.messages import Message
from proxy.errors import RequestError

_LATE = (Message("system", "A"), Message("user", "B"), Message("system", "C"))
"""A conversation that such a template refuses."""


def wants_system_first(render: Callable[..., object]) -> bool:
    """Whether the template behind `render`, which raises RequestError, is such a template."""

    def accepts(messages: Sequence[Message]) -> bool:
        try:
            render(messages, [], generate=False)
        except RequestError:
            return False
        return True

    return not accepts(_LATE) and accepts(_LATE[:2])


def system_first(messages: Sequence[Message], *, from_the_start: bool) -> list[Message]:
    """The messages with one system message, the first: the leading ones, joined by an empty line.
    Every other becomes a user message. `from_the_start` is false for the end of a conversation."""
    leading = (
        list(takewhile(lambda each: each.role == "system", messages)) if from_the_start else []
    )
    text = "\n\n".join(message.text for message in leading)
    rest = messages[len(leading) :]
    return [
        *([Message("system", text)] if leading else []),
        *(structs.replace(each, role="user") if each.role == "system" else each for each in rest),
    ]
