"""Refuses prompts that are too long before work that grows with their length is spent on them.

Invariant: text that passes has at most `max_chars` characters, so that tokenising it takes seconds
and not minutes. What is refused is a ContextOverflow, on which agents compact their history.
"""

from __future__ import annotations

import asyncio

import orjson

from proxy.conversation.messages import Conversation, message_chars
from proxy.errors import ContextOverflow
from proxy.rendering.rendering import Rendering

CHARS_PER_TOKEN = 8
"""Characters per token of the context that a prompt may have. English and code have 3 to 5, tables
of white space up to 8."""
MIN_CHARS = 1_000_000
"""A prompt may always have this number of characters; tokenising them takes about a second."""
UNKNOWN_CONTEXT_TOKENS = 2**20
"""Assumed where neither the model nor an engine says how long its context is."""
THREADED_CHARS = 50_000
"""Longer new text is tokenised in a thread: 50,000 characters take about 10 ms."""


def new_chars(conversation: Conversation, since: int) -> int:
    """Number of characters that have to be tokenised if the messages before index `since` are
    recorded: with `since` 0, those of the tools, too."""
    if conversation.raw is not None:
        return len(conversation.raw)
    chars = len(conversation.prefill or "")
    chars += sum(message_chars(message) for message in conversation.messages[since:])
    return chars if since else chars + len(orjson.dumps(conversation.tools))


def max_chars(room: int | None) -> int:
    """Number of characters that a prompt may have for a context of `room` tokens."""
    return max(MIN_CHARS, CHARS_PER_TOKEN * (room or UNKNOWN_CONTEXT_TOKENS))


def refuse_too_many_chars(conversation: Conversation, since: int, room: int | None) -> int:
    """Returns `new_chars`. Raises ContextOverflow if they are more than `max_chars`."""
    chars = new_chars(conversation, since)
    if chars > max_chars(room):
        raise ContextOverflow(chars // CHARS_PER_TOKEN, room or UNKNOWN_CONTEXT_TOKENS)
    return chars


async def refuse_overlong(
    conversation: Conversation, since: int, rendering: Rendering, room: int | None
) -> bool:
    """Returns whether the new text is long, and should be rendered in a thread.

    Raises:
        ContextOverflow: the text from message `since` on cannot fit, or is too long to try.
    """
    chars = refuse_too_many_chars(conversation, since, room)
    if chars > THREADED_CHARS and room is not None:
        least = await asyncio.to_thread(rendering.least_tokens, conversation, since)
        if least >= room:
            raise ContextOverflow(least, room)
    return chars > THREADED_CHARS
