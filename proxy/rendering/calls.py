"""Reads the tool calls of an answer, finished or not.

In some families the model writes a call's arguments as JSON, which is passed on unchanged; in
others it writes one tag per argument, or a notation of its own, which is converted to JSON.
Invariant: while an answer grows, the text of a call's arguments only grows, so that it can be
streamed. A call is recognised as soon as its name and the beginning of its arguments can be read.
Arguments that turn out not to be JSON, or that a truncated answer leaves unfinished, are sent as
written, as other providers do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
from renderers.base import ParsedToolCall, ToolCallParseStatus

from proxy.conversation import ToolCall
from proxy.conversation.json_values import parsed_arguments
from proxy.rendering.families import Family

_READABLE = (
    ToolCallParseStatus.OK,
    ToolCallParseStatus.INVALID_JSON,
    ToolCallParseStatus.MALFORMED_STRUCTURE,
)
_MARKS = re.compile(r'\\.|\\$|[{}"]', re.DOTALL)


class JsonBlock:
    """Parses the text of one call incrementally. `feed` returns the new part of the arguments."""

    def __init__(self, family: Family, name: str | None = None) -> None:
        """`name` is the tool's name if the renderer reads it and it is not in the block."""
        self._form = family.call_form
        self._known_name = name
        self._head = ""
        self._waiting = ""
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._ended = False
        self.name = ""
        """The tool's name; empty until the arguments have begun."""

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str) -> str:
        if self._form is None or self._ended:
            return ""
        if not self.name:
            self._head += text
            begun = self._form.match(self._head)
            if begun is None:
                return ""
            self.name = call_name(begun.groupdict(), self._known_name)
            text = self._head[begun.end() :] if self.name else ""
        ready = self._take(text)
        if ready:
            self._pieces.append(ready)
        return ready

    def _take(self, text: str) -> str:
        """The text up to the object's end. Trailing white space is held back."""
        end = self._object_end(text)
        self._ended = end is not None
        whole = self._waiting + text[:end]
        ready = whole.rstrip()
        self._waiting = whole[len(ready) :]
        return ready

    def _object_end(self, text: str) -> int | None:
        start = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        for mark in _MARKS.finditer(text, start):
            char = mark[0]
            if char[0] == "\\":
                self._escaped = len(char) == 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    return mark.end()
        return None


def begins_call(family: Family, text: str, tools: list[dict[str, Any]]) -> bool:
    """Whether `text` begins like a call of one of `tools`, up to the beginning of its arguments."""
    return _beginning(family, text, tools) is not None


def read_call(
    family: Family,
    attempt: ParsedToolCall,
    tools: list[dict[str, Any]],
    *,
    unfinished: bool = False,
) -> ToolCall | None:
    """The attempted call; None if it has no name or no object of arguments. `unfinished`: more of
    it may follow.

    Its id is empty if the model wrote none.
    """
    call_id = attempt.id or ""
    if family.arguments_to_json is not None:
        begun = _beginning(family, attempt.raw, tools)
        if begun is None:
            return None
        name, text = begun
        return ToolCall(call_id, name, family.arguments_to_json(text, unfinished=unfinished))
    block = JsonBlock(family, attempt.name)
    block.feed(attempt.raw)
    if block.name:
        return ToolCall(call_id, block.name, block.arguments)
    if attempt.status not in _READABLE or not attempt.name or not isinstance(attempt.name, str):
        return None
    written = _object_text(attempt.arguments)
    return None if written is None else ToolCall(call_id, attempt.name, written)


def _beginning(family: Family, text: str, tools: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The tool's name and the text from its arguments on, if it is one of `tools` or there are
    none."""
    found = family.call_form.match(text) if family.call_form else None
    if found is None:
        return None
    name = call_name(found.groupdict())
    offered = not tools or any(tool["function"]["name"] == name for tool in tools)
    return (name, text[found.end() :]) if name and offered else None


def call_name(found: dict[str, str | None], known: str | None = None) -> str:
    """The tool's name in a match of `Family.call_form`; empty if it is not one."""
    if found.get("quoted"):
        name = parsed_arguments(found["quoted"] or "")
        return name if isinstance(name, str) and name[:1] != '"' else ""
    return found.get("name") or known or ""


def open_calls(
    family: Family,
    ended: Sequence[ParsedToolCall],
    ended_within: Sequence[ParsedToolCall],
    tools: list[dict[str, Any]],
    held_chars: int,
) -> list[ToolCall]:
    """The calls of an unfinished block, as if it ended now.

    `ended` and `ended_within` are parses of the block with each of the family's `call_closes`
    appended. The last `held_chars` of an unfinished argument are held back.
    """
    if not ended or not ended_within:
        return []
    *whole, last = ended
    calls = [call for attempt in whole if (call := read_call(family, attempt, tools))]
    within = ended_within[-1].arguments
    known = last.arguments if isinstance(last.arguments, dict) else {}
    if last.status not in _READABLE or not last.name or len(calls) < len(whole):
        return calls
    text = _object_text(known)
    if text is None or not isinstance(within, dict) or not (known or within):
        return calls
    text = text[:-1]
    key = next((key for key in within if key not in known), None)
    if key is not None and _is_text(tools, last.name, key) and isinstance(within[key], str):
        value = within[key][: len(within[key]) - held_chars or None]
        value = value.rstrip("\N{REPLACEMENT CHARACTER}").rstrip() if held_chars else value
        pair = f"{orjson.dumps(key).decode()}:{orjson.dumps(value).decode()[:-1]}"
        text += ("," if known else "") + pair
    return [*calls, ToolCall("", last.name, text)]


def _is_text(tools: list[dict[str, Any]], tool: str, key: str) -> bool:
    """Whether an argument is declared as a string. Any other may turn out to be JSON."""
    for entry in tools:
        function = entry["function"]
        if function["name"] == tool:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            declared = properties.get(key) if isinstance(properties, dict) else None
            return isinstance(declared, dict) and declared.get("type") in ("string", ["string"])
    return False


def _object_text(arguments: Any) -> str | None:
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # nested too deep, or an integer beyond 64 bits
        return None
