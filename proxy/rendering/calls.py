"""Reads the tool calls of an answer, finished or not.

In some families the model writes a call's arguments as JSON, which is passed on unchanged; in
others in a notation of its own, which is converted to JSON, or with one tag per argument
(`tagged_calls`).
Invariant: while an answer grows, the text of a call's arguments only grows, so that it can be
streamed. A call is recognised as soon as its name and the beginning of its arguments can be read.
Arguments that turn out not to be JSON, or that a truncated answer leaves unfinished, are sent as
written, as other providers do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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

    @property
    def is_in_string(self) -> bool:
        """Whether what follows is part of a string of the arguments."""
        return self._in_string and not self._ended

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


def joined_blocks(
    read: Sequence[ParsedToolCall],
    family: Family,
    closes: int,
    ids: list[int],
    decode: Callable[[list[int]], str],
    *,
    unfinished: bool,
) -> list[ParsedToolCall]:
    """The blocks of JSON in `ids`, which the renderer has `read` up to the first token `closes`,
    also where it is part of a string.

    A block goes on to the end of its JSON. If that does not come, the block ends where the renderer
    ends it, and so do all later ones. In an unfinished answer it may still come, so that nothing
    after it is certain.
    """
    out: list[ParsedToolCall] = []
    joined_to = 0
    for at, block in enumerate(read):
        start, _ = block.token_span or (0, 0)
        if start < joined_to:
            continue
        cut = block.status is ToolCallParseStatus.INVALID_JSON and block.token_span is not None
        whole, in_string = _joined(family, ids, start, closes, decode) if cut else (None, False)
        if whole is not None and whole.token_span is not None:
            joined_to = whole.token_span[1]
        out.append(whole or block)
        if in_string:
            return out if unfinished else [*out, *read[at + 1 :]]
    return out


def _joined(
    family: Family,
    ids: list[int],
    start: int,
    closes: int,
    decode: Callable[[list[int]], str],
) -> tuple[ParsedToolCall | None, bool]:
    """The block from token `start` to the first token `closes` outside of its strings, if it is
    JSON; and whether there was one in a string that does not end like that."""
    json, pieces, at, crossed = JsonBlock(family), list[str](), start + 1, False
    while (end := next((i for i in range(at, len(ids)) if ids[i] == closes), None)) is not None:
        pieces.append(decode(ids[at:end]))
        json.feed(pieces[-1])
        if not json.is_in_string:
            text = "".join(pieces).strip()
            value = parsed_arguments(text) if crossed else None
            if isinstance(value, dict):
                span, ok = (start, end + 1), ToolCallParseStatus.OK
                return ParsedToolCall(raw=text, token_span=span, status=ok), False
            return None, crossed
        pieces.append(decode([closes]))
        json.feed(pieces[-1])
        at, crossed = end + 1, True
    return None, crossed


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
