"""What the user asked for: the first words of a session, by which a person knows it again."""

from __future__ import annotations

import re
from collections.abc import Iterable

from proxy.conversation.images import shown
from proxy.conversation.recorded import parse_request

CHARS = 60
_ADDED = re.compile(r"\s*<([a-z][\w-]*)>.*?</\1>\s*", re.DOTALL)
"""What an agent puts around the user's words, such as Claude Code's `<system-reminder>` and Codex's
`<environment_context>`."""


def first_words(requests: Iterable[bytes]) -> str:
    """The first line that the user wrote, at most `CHARS` characters; empty: none is recorded.
    `requests` are those of a session's turns, as they are recorded."""
    for recorded in requests:
        request = parse_request(recorded)
        for message in () if request is None else request.messages:
            if message.role == "user" and (said := _ADDED.sub("\n", shown(message.text)).strip()):
                line = " ".join(said.splitlines()[0].split())
                return line if len(line) <= CHARS else line[: CHARS - 1] + "…"
    return ""
