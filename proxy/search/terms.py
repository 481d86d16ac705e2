"""Searches what agents and models wrote: text, a regular expression, tools, causes of forks, edits
of tests.

Invariant: a search takes at most `REGEX_S` of matching, whatever the expression and the text are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
import regex
from pydantic import with_config
from typing_extensions import TypedDict

from proxy.conversation.images import shown
from proxy.conversation.messages import Message, load_answer
from proxy.conversation.recorded import load_message
from proxy.errors import RequestError
from proxy.http.valid_json import CLOSED
from proxy.records import ForkCause
from proxy.search.edited_tests import edited_test
from proxy.store.browser import WrittenTurn

REGEX_S = 1.0
CONTEXT_CHARS = 80
MATCH_CHARS = 200
MATCHES = 3
"""Matches of one turn that are sent."""
MAX_EXPRESSION = 500
EDIT_CHARS = 200_000
"""Characters of the tool calls of one turn that are examined for edits of tests."""


@with_config(CLOSED)
class MatchJson(TypedDict):
    """A place that a search found."""

    role: str
    before: str
    match: str
    after: str


@with_config(CLOSED)
class HitJson(TypedDict):
    """A turn that a search found."""

    session: str
    index: int
    cause: ForkCause | None
    agent: str | None
    started_at: float
    matches: list[MatchJson]


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """What a turn must have, all of it. Example: SearchTerms(expression=compiled, tool="shell")"""

    expression: regex.Pattern[str] | None = None
    tool: str = ""
    """The name of a tool that the turn's answer or request calls."""
    cause: ForkCause | None = None
    edits_tests: bool = False
    """A tool call changes a file of tests (`edited_tests.py`)."""
    answers_only: bool = False
    """Only the answer counts, not what the agent sent."""

    @classmethod
    def of(
        cls,
        text: str = "",
        expression: str = "",
        tool: str = "",
        cause: ForkCause | None = None,
        *,
        edits_tests: bool = False,
        answers_only: bool = False,
    ) -> SearchTerms:
        """Raises RequestError if there is nothing to search for, or the expression is wrong."""
        if not (text or expression or tool or cause or edits_tests):
            raise RequestError("give text, regex, tool, cause or edits_tests to search for")
        if max(len(text), len(expression), len(tool)) > MAX_EXPRESSION:
            raise RequestError(f"what is searched for may have {MAX_EXPRESSION} characters")
        if text and expression:
            raise RequestError("give text or regex, not both")
        try:
            pattern = expression or regex.escape(text)
            flags = regex.VERSION0 | (0 if expression else regex.IGNORECASE)
            compiled = regex.compile(pattern, flags) if pattern else None
        except (regex.error, ValueError) as error:  # such as flags that exclude each other
            raise RequestError(f"regex: {error}") from None
        return cls(compiled, tool, cause, edits_tests, answers_only)

    def hits(self, turns: Sequence[WrittenTurn]) -> list[HitJson]:
        """The turns that have all of it, as JSON.

        Raises:
            RequestError: the expression took longer than `REGEX_S`.
        """
        time_left = MatchingTime(REGEX_S)
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
            if (matches := self.matches(turn, time_left)) is not None
        ]

    def matches(self, turn: WrittenTurn, time_left: MatchingTime) -> list[MatchJson] | None:
        """The places that match; None if the turn does not.

        Raises:
            RequestError: the time is used up.
        """
        if self.cause is not None and turn.fork_cause is not self.cause:
            return None
        messages = list(_messages(turn, answers_only=self.answers_only))
        if self.tool and not any(
            call.name == self.tool for message in messages for call in message.tool_calls
        ):
            return None
        edits = list(_edits(messages)) if self.edits_tests else []
        if self.edits_tests and not edits:
            return None
        if self.expression is None:
            return edits
        return list(self._found(messages, self.expression, time_left)) or None

    def _found(
        self, messages: Sequence[Message], expression: regex.Pattern[str], time_left: MatchingTime
    ) -> Iterator[MatchJson]:
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
class MatchingTime:
    """The matching that a search may still do."""

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


def _edits(messages: Sequence[Message]) -> Iterator[MatchJson]:
    """The first tool calls that change files of tests."""
    calls = [(message.role, call) for message in messages for call in message.tool_calls]
    left = EDIT_CHARS
    count = 0
    for role, call in calls:
        path = edited_test(call.name, call.arguments[: max(0, left)])
        left -= len(call.arguments)
        if path is not None:
            text = f"{call.name}({call.arguments})"
            start = max(0, text.find(path))
            yield _shown(role, text, start, start + len(path))
            count += 1
        if left <= 0 or count == MATCHES:
            return


def _messages(turn: WrittenTurn, *, answers_only: bool) -> Iterator[Message]:
    """What the turn added to its conversation: the request's new messages, and the answer."""
    if turn.request and not answers_only:
        for fields in orjson.loads(turn.request).get("messages", []):
            yield load_message(fields)
    if turn.answer:
        yield load_answer(turn.answer)


def _texts(message: Message) -> Iterator[str]:
    yield shown(message.text)
    if message.reasoning:
        yield message.reasoning
    for call in message.tool_calls:
        yield f"{call.name}({call.arguments})"


def _shown(role: str, text: str, start: int, end: int) -> MatchJson:
    return {
        "role": role,
        "before": text[max(0, start - CONTEXT_CHARS) : start],
        "match": text[start : min(end, start + MATCH_CHARS)],
        "after": text[end : end + CONTEXT_CHARS],
    }
