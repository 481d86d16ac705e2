"""Sampled ids → the message, once the answer is complete.

Invariant: as with `AnswerParser`, the deltas that `finish` returns equal its message.
"""

from __future__ import annotations

from typing import Any

from proxy.conversation.messages import Message
from proxy.records import Ids
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, send_calls
from proxy.rendering.rendering import Rendering
from proxy.rendering.stops import first_stop


class WholeParser:
    """Parses one answer at its end, with the interface of `AnswerParser`. It never asks to end
    sampling."""

    ended = False

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
        self._stop = stop
        self._calls = calls
        self._one_call = one_call
        self._ids = list(opening or [])
        self.stop_string: str | None = None
        """The stop string that ended the text, if any."""

    def feed(self, ids: list[int]) -> list[Delta]:
        self._ids += ids
        return []

    def finish(self) -> tuple[list[Delta], Message]:
        """The whole message, and its deltas."""
        message = self._rendering.parse(
            self._ids, self._prompt_end, self._tools, calls=self._calls, one_call=self._one_call
        )
        found = first_stop(message.text, self._stop)
        if found is not None:
            end, self.stop_string = found
            message.text = message.text[:end].rstrip()
        out: list[Delta] = []
        if message.reasoning:
            out.append(ReasoningDelta(message.reasoning))
        if message.text:
            out.append(TextDelta(message.text))
        if message.tool_calls:
            calls, message.tool_calls = message.tool_calls, []
            send_calls(message.tool_calls, calls, out)
        return out, message
