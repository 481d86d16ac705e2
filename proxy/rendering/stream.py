"""Sampled ids → deltas of text, reasoning and tool calls, while the model is still sampling.

Invariant: the concatenated deltas of an answer equal the message that `finish` returns. That
message is recorded, sent to the agent and matched against later requests. A delta is sent only if
no later token can change it: trailing white space and a possible beginning of a stop string are
held back, and a tool call is sent from the first character of its arguments on.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from tokenizers.decoders import DecodeStream

from proxy.conversation.messages import Message, ToolCall, new_call_id
from proxy.records import Ids
from proxy.rendering.calls import JsonBlock
from proxy.rendering.deltas import (
    ArgumentsDelta,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    send_calls,
)
from proxy.rendering.markers import Markers
from proxy.rendering.rendering import Rendering
from proxy.rendering.stops import begun, first_stop


class _Channel(Enum):
    START = auto()
    """Only white space so far; the reasoning may still open."""
    REASONING = auto()
    REASONING_HELD = auto()
    """A tool call opened inside the reasoning. It is a call only if no `</think>` follows."""
    HELD = auto()
    """The rest can only be interpreted once the answer is complete."""
    TEXT = auto()
    TOOL = auto()
    BETWEEN = auto()
    """After the first tool call; text here is not part of the answer."""
    STOPPED = auto()


_IN_REASONING = (_Channel.REASONING, _Channel.REASONING_HELD)
_OUTSIDE = (_Channel.START, _Channel.TEXT, _Channel.BETWEEN)


class AnswerParser:
    """Parses one answer while it is sampled. Call `feed` for each batch of ids, then `finish`
    once."""

    def __init__(
        self,
        rendering: Rendering,
        prompt_end: Ids,
        tools: list[dict[str, Any]],
        *,
        markers: Markers | None,
        stop: tuple[str, ...] = (),
        calls: bool = True,
        one_call: bool = False,
        opening: list[int] | None = None,
        given_chars: int = 0,
        plain: bool = False,
    ) -> None:
        """`markers` may be None for a `plain` answer. `opening` holds the ids at the end of the
        prompt that belong to the answer. The first `given_chars` characters of the text are the
        agent's own, in which stop strings end nothing. With `one_call` the answer ends where a
        second tool call begins. A `plain` answer (Completions) has neither reasoning nor tool
        calls, and its white space is kept."""
        self._rendering = rendering
        self._prompt_end = prompt_end
        self._tools = tools
        self._stop = stop
        self._given_chars = given_chars
        self._calls = calls
        self._one_call = one_call
        self._second_call = False
        self._markers = markers
        self._marks = rendering.closes if markers is None else rendering.closes | markers.all
        self._ids: list[int] = []
        self._channel = _Channel.START
        self._plain = plain
        self._text = _Trimmed(stop, trim=not plain, given_chars=given_chars)
        self._reasoning = _Trimmed(())
        self._stream = _Decoder(rendering)
        self._early: list[Delta] = []
        self._block = JsonBlock(rendering.family)
        self._block_start = 0
        self._sent_calls: list[ToolCall] = []
        if markers is not None and self._opens_in_reasoning(markers):
            self._channel = _Channel.REASONING
        self._early = self.feed(opening or [])

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._text.stop_string

    @property
    def ended(self) -> bool:
        """Whether sampling can stop."""
        return self._second_call or self._text.stop_string is not None

    def feed(self, ids: list[int]) -> list[Delta]:
        out, self._early = self._early, []
        for token in ids:
            self._ids.append(token)
            if self._channel is _Channel.TEXT and token not in self._marks:
                _send(self._text, TextDelta, self._stream.step(token), out)
            elif self._plain:
                self._step_plain(token, out)
            elif self._markers is not None:
                self._step(token, self._markers, out)
        return out

    def finish(self) -> tuple[list[Delta], Message]:
        """The remaining deltas, and the whole message."""
        if self._plain:
            spoken = self._rendering.before_stop(self._ids)
            message = Message("assistant", self._rendering.tokenizer.decode(spoken))
        else:
            message = self._rendering.parse(
                self._ids,
                self._prompt_end,
                self._tools,
                calls=self._calls,
                one_call=self._one_call,
            )
        found = first_stop(message.text, self._stop, self._given_chars)
        if found is not None:
            text = message.text[: found[0]]
            message.text = text if self._plain else text.rstrip()
        out, self._early = self._early, []
        self._end_call()
        if self._sent_calls:  # text between the pieces of a call would end it
            send_calls(self._sent_calls, message.tool_calls, out)
        message.reasoning = self._rest(self._reasoning, message.reasoning or "", out) or None
        message.text = self._rest(self._text, message.text, out)
        send_calls(self._sent_calls, message.tool_calls, out)
        message.tool_calls = self._sent_calls
        return out, message

    def _rest(self, channel: _Trimmed, whole: str, out: list[Delta]) -> str:
        """Sends the rest of `whole` and returns the channel's final text. If `whole` does not
        extend the text that was sent, the sent text is final."""
        if not whole.startswith(channel.sent):
            return channel.sent
        missing = whole[len(channel.sent) :]
        if missing:
            out.append(TextDelta(missing) if channel is self._text else ReasoningDelta(missing))
        return whole

    def _step(self, token: int, markers: Markers, out: list[Delta]) -> None:
        channel = self._channel
        if channel is _Channel.STOPPED:
            return
        if token in self._rendering.stop_token_ids:
            self._channel = _Channel.STOPPED
        elif channel in _IN_REASONING and token == markers.end_think:
            self._enter(_Channel.TEXT)
        elif channel is _Channel.START and token == markers.think and self._is_blank():
            self._enter(_Channel.REASONING)
        elif channel is _Channel.REASONING and token == markers.tool:
            self._channel = _Channel.REASONING_HELD
        elif token == markers.tool and channel is _Channel.BETWEEN and self._one_call:
            self._second_call, self._channel = True, _Channel.STOPPED
        elif token == markers.tool and channel in _OUTSIDE:
            self._enter(_Channel.TOOL if self._calls else _Channel.HELD)
            self._block_start = len(self._ids) - 1
            self._block = JsonBlock(self._rendering.family)
        elif channel is _Channel.TOOL and token == markers.end_tool:
            if self._block.is_in_string:
                self._channel = _Channel.HELD  # a part of the string, or the end of malformed JSON
            else:
                self._close_block(out)
        elif channel is _Channel.TOOL:
            self._grow_call(self._stream.step(token), out)
        elif channel is _Channel.REASONING:
            if token != markers.think:
                _send(self._reasoning, ReasoningDelta, self._stream.step(token), out)
        elif channel in (_Channel.START, _Channel.TEXT):
            _send(self._text, TextDelta, self._stream.step(token), out)
            if self._text.has_begun:
                self._channel = _Channel.TEXT

    def _step_plain(self, token: int, out: list[Delta]) -> None:
        if token in self._rendering.stop_token_ids:
            self._channel = _Channel.STOPPED
        elif self._channel is not _Channel.STOPPED:
            _send(self._text, TextDelta, self._stream.step(token), out)

    def _is_blank(self) -> bool:
        """Whether only white space precedes the current token."""
        if self._text.has_begun:
            return False
        return not self._rendering.tokenizer.decode(self._ids[:-1]).strip()

    def _enter(self, channel: _Channel) -> None:
        self._channel = channel
        self._stream = _Decoder(self._rendering)

    def _grow_call(self, text: str, out: list[Delta]) -> None:
        begun = bool(self._block.name)
        arguments = self._block.feed(text)
        if self._block.name and not begun:
            call = ToolCall(new_call_id(self._sent_calls), self._block.name, "")
            out.append(ToolCallStart(len(self._sent_calls), call.id, call.name))
            self._sent_calls.append(call)
        if arguments:
            out.append(ArgumentsDelta(len(self._sent_calls) - 1, arguments))

    def _end_call(self) -> None:
        """Makes the arguments that were sent for the last block the arguments of its call."""
        if self._block.name:
            self._sent_calls[-1].arguments = self._block.arguments

    def _close_block(self, out: list[Delta]) -> None:
        """Ends a call that is being streamed, or parses the whole block and sends its call.

        A malformed block is left to `finish`, together with everything after it, because `finish`
        places its text after the calls.
        """
        self._channel = _Channel.BETWEEN
        if self._block.name:
            self._end_call()
            return
        block = self._ids[self._block_start :]
        parsed = self._rendering.parse(block, self._prompt_end[:0], self._tools, calls=True)
        if len(parsed.tool_calls) != 1 or parsed.text:
            self._channel = _Channel.HELD
            return
        send_calls(self._sent_calls, [*self._sent_calls, *parsed.tool_calls], out)

    def _opens_in_reasoning(self, markers: Markers) -> bool:
        """Whether the prompt ends inside an open `<think>`."""
        for token in reversed(self._prompt_end.tolist()):
            if token in (markers.end_think, *self._rendering.stop_token_ids):
                return False
            if token == markers.think:
                return True
        return False


class _Trimmed:
    """Text of one channel, without surrounding white space and stop strings."""

    def __init__(self, stop: tuple[str, ...], *, trim: bool = True, given_chars: int = 0) -> None:
        self._stop = stop
        self._given_chars = given_chars
        """Number of characters, not sent yet, in which stop strings end nothing."""
        self._trim = trim
        self._waiting = ""
        self._sent: list[str] = []
        self.stop_string: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any text was sent."""
        return bool(self._sent)

    @property
    def sent(self) -> str:
        """The text that was sent."""
        return "".join(self._sent)

    def push(self, text: str) -> str:
        """Adds `text` and returns the part that can be sent now."""
        if self.stop_string is not None:
            return ""
        waiting = self._waiting + text
        if self._trim and not self._sent:
            waiting = waiting.lstrip()
        ready = waiting
        if self._stop:
            found = first_stop(waiting, self._stop, self._given_chars)
            if found is not None:
                end, self.stop_string = found
            else:
                end = len(waiting) - begun(waiting, self._stop)
            ready = waiting[:end]
        if self._trim:
            ready = ready.rstrip()
        self._waiting = waiting[len(ready) :]
        if ready:
            self._sent.append(ready)
            self._given_chars = max(0, self._given_chars - len(ready))
        return ready


class _Decoder:
    """Decodes consecutive tokens into pieces of whole characters."""

    def __init__(self, rendering: Rendering) -> None:
        self._fast = rendering.tokenizer.fast
        self._stream = DecodeStream(skip_special_tokens=False)

    def step(self, token: int) -> str:
        return self._stream.step(self._fast, token) or ""


def _send(
    channel: _Trimmed, kind: type[TextDelta] | type[ReasoningDelta], text: str, out: list[Delta]
) -> None:
    ready = channel.push(text) if text else ""
    if ready:
        out.append(kind(ready))
