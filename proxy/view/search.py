"""Searches what agents and models wrote: text, a regular expression, tools, causes of forks.

Turns are read from the newest to the oldest, a bounded number of them and of bytes per request; the
reader asks for older ones. Invariant: a request takes at most `REGEX_S` of matching, whatever the
expression and the text are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import regex

from proxy.conversation.messages import Message, load_answer
from proxy.conversation.recorded import load_message
from proxy.errors import RequestError
from proxy.records import ForkCause
from proxy.store.browser import WrittenTurn

TURNS = 500
"""Turns that one request reads."""
READ_BYTES = 8 * 2**20
"""Bytes of requests and answers that one request reads, or one turn if that is longer."""
REGEX_S = 1.0
CONTEXT_CHARS = 80
MATCH_CHARS = 200
MATCHES = 3
"""Matches of one turn that are sent."""
MAX_EXPRESSION = 500


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """What a turn must have, all of it. Example: SearchTerms(expression=compiled, tool="shell")"""

    expression: regex.Pattern[str] | None = None
    tool: str = ""
    """The name of a tool that the turn's answer or request calls."""
    cause: ForkCause | None = None

    @classmethod
    def of(cls, text: str, expression: str, tool: str, cause: ForkCause | None) -> SearchTerms:
        """Raises RequestError if there is nothing to search for, or the expression is wrong."""
        if not (text or expression or tool or cause):
            raise RequestError("give text, regex, tool or cause to search for")
        if max(len(text), len(expression), len(tool)) > MAX_EXPRESSION:
            raise RequestError(f"what is searched for may have {MAX_EXPRESSION} characters")
        if text and expression:
            raise RequestError("give text or regex, not both")
        try:
            pattern = expression or regex.escape(text)
            flags = regex.VERSION0 | (0 if expression else regex.IGNORECASE)
            compiled = regex.compile(pattern, flags) if pattern else None
        except regex.error as error:
            raise RequestError(f"regex: {error}") from None
        return cls(compiled, tool, cause)

    def hits(self, turns: Sequence[WrittenTurn]) -> list[dict[str, Any]]:
        """The turns that have all of it, as JSON.

        Raises:
            RequestError: the expression took longer than `REGEX_S`.
        """
        time_left = _MatchingTime(REGEX_S)
        return [
            {
                "session": turn.session_id,
                "index": turn.index,
                "cause": turn.fork_cause,
                "agent": turn.agent_id and turn.agent_id[:200],
                "started_at": turn.started_at,
                "matches": matches,
            }
            for turn in turns
            if (matches := self._matches(turn, time_left)) is not None
        ]

    def _matches(self, turn: WrittenTurn, time_left: _MatchingTime) -> list[dict[str, str]] | None:
        """The places that match; None if the turn does not."""
        if self.cause is not None and turn.fork_cause is not self.cause:
            return None
        messages = list(_messages(turn))
        if self.tool and not any(
            call.name == self.tool for message in messages for call in message.tool_calls
        ):
            return None
        if self.expression is None:
            return []
        return list(self._found(messages, self.expression, time_left)) or None

    def _found(
        self, messages: Sequence[Message], expression: regex.Pattern[str], time_left: _MatchingTime
    ) -> Iterator[dict[str, str]]:
        count = 0
        for message in messages:
            for text in _texts(message):
                found = time_left.search(expression, text)
                if found is not None:
                    yield _shown(message.role, text, *found.span())
                    count += 1
                    if count == MATCHES:
                        return


@dataclass(slots=True)
class _MatchingTime:
    """The matching that a request may still do."""

    left_s: float

    def search(self, expression: regex.Pattern[str], text: str) -> regex.Match[str] | None:
        """The first match. Raises RequestError if the time is used up."""
        began_s = time.monotonic()
        try:
            if self.left_s <= 0:
                raise TimeoutError
            found = expression.search(text, timeout=self.left_s, concurrent=True)
        except TimeoutError:
            raise RequestError(
                f"regex: it took longer than {REGEX_S:g} s; make it simpler, or search for text"
            ) from None
        self.left_s -= time.monotonic() - began_s
        return found


def _messages(turn: WrittenTurn) -> Iterator[Message]:
    """What the turn added to its conversation: the request's new messages, and the answer."""
    if turn.request:
        for fields in orjson.loads(turn.request).get("messages", []):
            yield load_message(fields)
    if turn.answer:
        yield load_answer(turn.answer)


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    if message.reasoning:
        yield message.reasoning
    for call in message.tool_calls:
        yield f"{call.name}({call.arguments})"


def _shown(role: str, text: str, start: int, end: int) -> dict[str, str]:
    return {
        "role": role,
        "before": text[max(0, start - CONTEXT_CHARS) : start],
        "match": text[start : min(end, start + MATCH_CHARS)],
        "after": text[end : end + CONTEXT_CHARS],
    }
