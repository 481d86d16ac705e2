"""Deltas for any family whose answers can be parsed: what has come so far is parsed again.

Invariant: as of `AnswerParser`, the deltas put together are the message that `finish` returns. An
answer of `n` tokens is parsed about `16 ln n` times, at lengths that grow by a sixteenth, so that
the cost stays linear; what a later token could take back (the last tool call, the beginning of a
marker, white space at the end) waits.
"""

from __future__ import annotations

from typing import Any

from proxy.conversation import Message, ToolCall
from proxy.records import Ids
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from proxy.rendering.rendering import Rendering
from proxy.rendering.stops import begun, first_stop

GROWTH = 16
"""The answer is parsed again when it has grown by this part of itself."""
HELD_CHARS = 48
"""No family's marker is longer: what may begin one within so many characters of the end waits."""
_OPENERS = "<[{|`«\N{FULLWIDTH VERTICAL LINE}"
_WHOLE_ANSWER_IS_A_CALL = ("{", "[")
"""Some families call a tool by an answer that is JSON: told only when it is whole."""


WHOLE_ONLY = frozenset({"gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "inkling"})
"""Families whose parsers read the beginning of an answer otherwise than the whole: theirs leave at
the end. (The tests try every family that a small vocabulary can build.)"""


class PrefixParser:
    """One answer in the making, as `AnswerParser`."""

    def __init__(
        self,
        rendering: Rendering,
        prompt_end: Ids,
        tools: list[dict[str, Any]],
        *,
        stop: tuple[str, ...] = (),
        calls: bool = True,
        opening: list[int] | None = None,
    ) -> None:
        self._rendering = rendering
        self._prompt_end = prompt_end
        self._tools = tools
        self._calls = calls
        self._stop = stop
        self.stop_string: str | None = None
        """The stop string that the text has run into: nothing more need be sampled."""
        self._ids = list(opening or [])
        self._next = 1
        self._text = ""
        self._reasoning = ""
        self._sent_calls: list[ToolCall] = []

    def feed(self, ids: list[int]) -> list[Delta]:
        self._ids += ids
        if len(self._ids) < self._next:
            return []
        self._next = len(self._ids) + max(1, len(self._ids) // GROWTH)
        parsed = self._rendering.parsed(self._ids, self._prompt_end, self._tools)
        out: list[Delta] = []
        reasoning = _stable((parsed.reasoning_content or "").strip())
        if not self._text and _grew(self._reasoning, reasoning):
            out.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        text = self._before_stop(parsed.content or "", ended=False)
        if parsed.reasoning_complete is not False and _grew(self._text, text):
            out.append(TextDelta(text[len(self._text) :]))
            self._text = text
        if self._calls:
            self._take_calls(self._rendering.calls_of(parsed)[:-1], out)
        return out

    def finish(self) -> tuple[list[Delta], Message]:
        """What had to wait, and the whole message."""
        message = self._rendering.parse(self._ids, self._prompt_end, self._tools, calls=self._calls)
        message.text = self._before_stop(message.text, ended=True)
        out: list[Delta] = []
        reasoning = message.reasoning or ""
        if _grew(self._reasoning, reasoning):
            out.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
        if not reasoning.startswith(self._reasoning):
            message.reasoning = self._reasoning
        if _grew(self._text, message.text):
            out.append(TextDelta(message.text[len(self._text) :]))
        if not message.text.startswith(self._text):
            message.text = self._text
        self._take_calls(message.tool_calls, out)
        message.tool_calls = self._sent_calls
        return out, message

    def _before_stop(self, text: str, *, ended: bool) -> str:
        """What can be sent of `text`."""
        found = first_stop(text, self._stop)
        if found is not None:
            end, self.stop_string = found
            return text[:end].rstrip()
        if ended:
            return text
        stable = _stable(text)
        return stable[: len(stable) - begun(stable, self._stop)].rstrip()

    def _take_calls(self, calls: list[ToolCall], out: list[Delta]) -> None:
        for call in calls[len(self._sent_calls) :]:
            out.append(ToolCallDelta(len(self._sent_calls), call))
            self._sent_calls.append(call)


def _grew(sent: str, text: str) -> bool:
    return len(text) > len(sent) and text.startswith(sent)


def _stable(text: str) -> str:
    """The part of an unfinished text that no later token changes."""
    if text.lstrip().startswith(_WHOLE_ANSWER_IS_A_CALL):
        return ""
    tail = max(0, len(text) - HELD_CHARS)
    begins = [at for opener in _OPENERS if (at := text.find(opener, tail)) >= 0]
    return text[: min(begins, default=len(text))].rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
