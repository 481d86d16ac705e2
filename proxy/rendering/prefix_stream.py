"""Deltas for any family whose answers can be parsed: what has come so far is parsed again.

Invariant: as of `AnswerParser`, the deltas put together are the message that `finish` returns. An
answer of `n` tokens is parsed about `16 ln n` times, at lengths that grow by a sixteenth, so that
the cost stays linear; what a later token could take back (the beginning of a marker, an argument
that may turn out to be a number, white space at the end) waits.
"""

from __future__ import annotations

from typing import Any

from renderers.base import ParsedResponse

from proxy.conversation import Message, ToolCall
from proxy.records import Ids
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, tell_calls
from proxy.rendering.rendering import Rendering
from proxy.rendering.stops import begun, first_stop

GROWTH = 16
"""The answer is parsed again when it has grown by this part of itself."""
HELD_CHARS = 48
"""No family's marker is longer: what may begin one within so many characters of the end waits."""
_OPENERS = "<[{|`«\N{FULLWIDTH VERTICAL LINE}"
_WHOLE_ANSWER_IS_A_CALL = ("{", "[")
"""Some families call a tool by an answer that is JSON: told only when it is whole."""
_WHOLE_CALLS = frozenset({"llama-3"})
"""No marker ends such a call: one more character after its JSON makes all of it text. Gemma 4's
calls leave whole, too (`calls.closes_of` has none for it): of a block that turns out malformed at
its end its reader keeps no argument, and those that had left could not be taken back."""
_CHANNEL_NAME = "thought"
"""Gemma's reasoning begins the answer, and itself with the channel's name, which is told apart when
it is whole."""
_CHANNEL_TOKENS = 10
"""At least as many as open the channel in a prompt."""
_APART = frozenset({"gpt-oss", "inkling", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "deepseek-v4"})
"""Families in which a call ends the reasoning for good."""
_REASONING_ENDS = ("</think>", "<channel|>")
"""A call in reasoning that was not ended so may turn out to be part of it."""


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
        one_call: bool = False,
        opening: list[int] | None = None,
    ) -> None:
        self._rendering = rendering
        self._prompt_end = prompt_end
        self._tools = tools
        self._calls = calls
        self._one_call = one_call
        self._second_call = False
        self._stop = stop
        self.stop_string: str | None = None
        """The stop string that the text has run into."""
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
        if self._may_tell_reasoning(reasoning) and _grew(self._reasoning, reasoning):
            out.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        text = self._before_stop((parsed.content or "").lstrip(), ended=False)
        if self._may_tell_text(parsed) and _grew(self._text, text):
            out.append(TextDelta(text[len(self._text) :]))
            self._text = text
        if self._calls and self._are_calls(parsed):
            calls = self._rendering.calls_so_far(
                parsed, self._ids, self._prompt_end, self._tools, held_chars=HELD_CHARS
            )
            self._second_call = self._one_call and bool(calls) and len(parsed.tool_calls) > 1
            tell_calls(self._sent_calls, calls[:1] if self._one_call else calls, out)
        return out

    @property
    def ended(self) -> bool:
        """Whether nothing more need be sampled."""
        return self.stop_string is not None or self._second_call

    def finish(self) -> tuple[list[Delta], Message]:
        """What had to wait, and the whole message."""
        message = self._rendering.parse(
            self._ids, self._prompt_end, self._tools, calls=self._calls, one_call=self._one_call
        )
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
        tell_calls(self._sent_calls, message.tool_calls, out)
        message.tool_calls = self._sent_calls
        return out, message

    def _may_tell_reasoning(self, reasoning: str) -> bool:
        if self._text:
            return False
        if self._rendering.name != "gemma4":
            return True
        decode = self._rendering.tokenizer.decode
        first = decode(self._ids[:1]) + decode(self._prompt_end[-_CHANNEL_TOKENS:].tolist())
        return "<|channel>" in first and not _CHANNEL_NAME.startswith(reasoning)

    def _may_tell_text(self, parsed: ParsedResponse) -> bool:
        """Inkling names a call's tool before it says that it is a call."""
        if parsed.reasoning_complete is False or self._rendering.name != "inkling":
            return parsed.reasoning_complete is not False
        said = self._rendering.tokenizer.decode(self._ids).rpartition("<|end_message|>")[2]
        return said.removeprefix("<|message_model|>").startswith("<|content_")

    def _are_calls(self, parsed: ParsedResponse) -> bool:
        """Whether no later token can make them anything else."""
        if not parsed.tool_calls or self._rendering.name in _WHOLE_CALLS:
            return False
        if not parsed.reasoning_content:
            return True
        text = self._rendering.tokenizer.decode(self._ids)
        return self._rendering.name in _APART or any(end in text for end in _REASONING_ENDS)

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


def _grew(sent: str, text: str) -> bool:
    return len(text) > len(sent) and text.startswith(sent)


def _stable(text: str) -> str:
    """The part of an unfinished text that no later token changes."""
    if text.lstrip().startswith(_WHOLE_ANSWER_IS_A_CALL):
        return ""
    tail = max(0, len(text) - HELD_CHARS)
    begins = [at for opener in _OPENERS if (at := text.find(opener, tail)) >= 0]
    return text[: min(begins, default=len(text))].rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
