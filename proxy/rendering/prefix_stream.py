"""Deltas for any family whose answers can be parsed, by parsing the growing answer repeatedly.

Invariant: as with `AnswerParser`, the concatenated deltas equal the message that `finish` returns.
An answer of `n` tokens is parsed about `16 ln n` times, each time when it has grown by a sixteenth,
so that the total cost is linear in `n`. Text that a later token could change is held back: the
beginning of a marker, an argument that may turn out to be a number, and trailing white space.
"""

from __future__ import annotations

from typing import Any

from renderers.base import ParsedResponse

from proxy.conversation import Message, ToolCall
from proxy.records import Ids
from proxy.rendering.calls import begins_call
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, send_calls
from proxy.rendering.rendering import Rendering
from proxy.rendering.stops import begun, first_stop

GROWTH = 16
"""The answer is parsed again when it has grown by 1 / GROWTH of its length."""
HELD_CHARS = 48
"""The length of the longest marker of any family. Text is held back from the first character
within this distance of the end that could begin a marker."""
_OPENERS = "<[{|`«\N{FULLWIDTH VERTICAL LINE}"
_WHOLE_ANSWER_IS_A_CALL = ("{", "[")
"""In some families an answer that is entirely JSON is a tool call, so it is sent only when it is
complete."""
_CHANNEL_TOKENS = 10
"""At least the number of tokens that open the reasoning channel in a prompt."""
_REASONING_ENDS = ("</think>", "<channel|>")
"""A tool call inside reasoning may turn out to be part of it unless one of these came before."""


class PrefixParser:
    """Parses one answer while it is sampled, with the interface of `AnswerParser`."""

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
        given_chars: int = 0,
    ) -> None:
        self._rendering = rendering
        self._prompt_end = prompt_end
        self._tools = tools
        self._calls = calls
        self._one_call = one_call
        self._second_call = False
        self._stop = stop
        self._given_chars = given_chars
        self.stop_string: str | None = None
        """The stop string that ended the text, if any."""
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
        calls: list[ToolCall] = []
        if self._calls and self._are_calls(parsed):
            calls, another = self._rendering.calls_so_far(parsed, self._ids, self._tools)
            self._second_call = self._one_call and another
        out: list[Delta] = []
        if not self._sent_calls:
            self._send_said(parsed, out, before_calls=bool(calls))
        send_calls(self._sent_calls, calls[:1] if self._one_call else calls, out)
        return out

    def _send_said(self, parsed: ParsedResponse, out: list[Delta], *, before_calls: bool) -> None:
        """Sends reasoning and text. They are complete before a call; what the model says after one
        is sent at the end, because a call is sent in one piece with its arguments."""
        reasoning = (parsed.reasoning_content or "").strip()
        reasoning = reasoning if before_calls else _stable(reasoning)
        if self._may_send_reasoning(reasoning) and _grew(self._reasoning, reasoning):
            out.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        text = (parsed.content or "").lstrip()
        text = self._before_stop(text.rstrip() if before_calls else text, ended=before_calls)
        if self._may_send_text(parsed) and _grew(self._text, text):
            out.append(TextDelta(text[len(self._text) :]))
            self._text = text

    @property
    def ended(self) -> bool:
        """Whether sampling can stop."""
        return self.stop_string is not None or self._second_call

    def finish(self) -> tuple[list[Delta], Message]:
        """The remaining deltas, and the whole message."""
        message = self._rendering.parse(
            self._ids, self._prompt_end, self._tools, calls=self._calls, one_call=self._one_call
        )
        message.text = self._before_stop(message.text, ended=True)
        out: list[Delta] = []
        if self._sent_calls:
            send_calls(self._sent_calls, message.tool_calls, out)
        reasoning = message.reasoning or ""
        if _grew(self._reasoning, reasoning):
            out.append(ReasoningDelta(reasoning[len(self._reasoning) :]))
        if not reasoning.startswith(self._reasoning):
            message.reasoning = self._reasoning
        if _grew(self._text, message.text):
            out.append(TextDelta(message.text[len(self._text) :]))
        if not message.text.startswith(self._text):
            message.text = self._text
        send_calls(self._sent_calls, message.tool_calls, out)
        message.tool_calls = self._sent_calls
        return out, message

    def _may_send_reasoning(self, reasoning: str) -> bool:
        if self._text:
            return False
        channel = self._rendering.family.reasoning_name
        if not channel:
            return True
        decode = self._rendering.tokenizer.decode
        first = decode(self._ids[:1]) + decode(self._prompt_end[-_CHANNEL_TOKENS:].tolist())
        return "<|channel>" in first and not channel.startswith(reasoning)

    def _may_send_text(self, parsed: ParsedResponse) -> bool:
        """Whether the text can no longer turn out to be a tool's name."""
        named_first = self._rendering.family.named_before_call
        if parsed.reasoning_complete is False or not named_first:
            return parsed.reasoning_complete is not False
        said = self._rendering.tokenizer.decode(self._ids).rpartition("<|end_message|>")[2]
        return said.removeprefix("<|message_model|>").startswith("<|content_")

    def _are_calls(self, parsed: ParsedResponse) -> bool:
        """Whether the parsed tool calls can no longer turn out to be text or reasoning."""
        family = self._rendering.family
        if not parsed.tool_calls:
            return False
        if family.call_is_answer:
            return begins_call(family, parsed.tool_calls[0].raw, self._tools)
        if not parsed.reasoning_content:
            return True
        if family.call_ends_reasoning:
            return True
        text = self._rendering.tokenizer.decode(self._ids)
        return any(end in text for end in _REASONING_ENDS)

    def _before_stop(self, text: str, *, ended: bool) -> str:
        """The part of `text` that can be sent: up to a stop string, or up to a possible beginning
        of one unless the answer has `ended`."""
        found = first_stop(text, self._stop, self._given_chars)
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
    """The part of an unfinished text that no later token can change."""
    if text.lstrip().startswith(_WHOLE_ANSWER_IS_A_CALL):
        return ""
    tail = max(0, len(text) - HELD_CHARS)
    begins = [at for opener in _OPENERS if (at := text.find(opener, tail)) >= 0]
    return text[: min(begins, default=len(text))].rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
