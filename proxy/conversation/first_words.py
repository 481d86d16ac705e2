"""What the user asked for: the first words of a session, by which a person knows it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from proxy.conversation.images import shown
from proxy.conversation.messages import Message
from proxy.conversation.recorded import parse_request

CHARS = 60
_ADDED = re.compile(r"\s*<([a-z][\w-]*)>.*?</\1>\s*", re.DOTALL)
"""What an agent puts around the user's words, such as Claude Code's `<system-reminder>` and Codex's
`<environment_context>`."""


def first_words(requests: Iterable[bytes]) -> str:
    """The first line that the user wrote, at most `CHARS` characters; empty: none is recorded.
    `requests` are those of a session's turns, as they are recorded."""
    return words_and_certainty(requests)[0]


def words_and_certainty(requests: Iterable[bytes]) -> tuple[str, bool]:
    """As `first_words`, and whether later requests change nothing.

    The user's words are the last ones of the first request that offers tools. Without tools, many
    agents first ask for a title in words of their own; and some introduce themselves before the
    user speaks (qwen-code).
    """
    found = ""
    for recorded in requests:
        request = parse_request(recorded)
        if request is None:
            continue
        words = _last_words(request.messages)
        if words and request.tools:
            return words, True
        found = found or words
    return found, False


def _last_words(messages: Sequence[Message]) -> str:
    for message in reversed(messages):
        if message.role == "user" and (said := _ADDED.sub("\n", shown(message.text)).strip()):
            line = " ".join(said.splitlines()[0].split())
            return line if len(line) <= CHARS else line[: CHARS - 1] + "…"
    return ""
