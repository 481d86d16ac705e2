"""An answer's tool calls, while they are written and when they have ended.

Two kinds of families: those whose models write a call's arguments as JSON, which is passed on as it
was written; and those that write one tag per argument, from which JSON is made. Invariant: while an
answer grows, the text of a call's arguments only grows, and so it can be streamed. A call is one as
soon as its name and the beginning of its arguments can be read: arguments that turn out to be no
JSON, or that a truncated answer leaves open, are told as far as they came, as other providers do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import orjson
from renderers.base import ParsedToolCall, ToolCallParseStatus

from proxy.conversation import ToolCall, parsed_arguments

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_WRAPPED = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)+")\s*,'
    r'\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)'
)
_DEEPSEEK = re.compile(
    rf"[^\n]*?<{_BAR}tool\u2581sep{_BAR}>[^\S\n]*(?P<name>[^\n]+?)[^\S\n]*\n"
    r"\s*(?:```(?:json)?\s*)?(?=\{)"
)
_KIMI = re.compile(r"(?s).*?<\|tool_call_argument_begin\|>\s*(?=\{)")
_BARE = re.compile(r"\s*(?=\{)")
_JSON_FORMS = {
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK,
    "gpt-oss": _BARE,
    "inkling": _WRAPPED,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "llama-3": _WRAPPED,
    "qwen3": _WRAPPED,
    "qwen3-vl": _WRAPPED,
    "template": _WRAPPED,
}
"""Per family: what stands before the arguments in a call's block. Where it names no tool, the
renderer does."""

_QWEN_XML = ("</tool_call>", "\n</parameter>\n</function>\n</tool_call>")
_GLM_XML = ("</tool_call>", "</arg_value></tool_call>")
_HY3_XML = ("</tool_call:opensource>", "</arg_value:opensource></tool_call:opensource>")
_XML_CLOSES = {
    "hy3": _HY3_XML,
    "deepseek-v4": (
        f"</{_BAR}DSML{_BAR}invoke>",
        f"</{_BAR}DSML{_BAR}parameter>\n</{_BAR}DSML{_BAR}invoke>",
    ),
    "minimax-m2": (
        "</invoke></minimax:tool_call>",
        "</parameter></invoke></minimax:tool_call>",
    ),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM_XML),
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), _GLM_XML),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "prime-qwen3"), _QWEN_XML),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8"), _QWEN_XML),
}
"""Per family: what ends a call behind a whole argument, and what ends one within an argument."""

_READABLE = (
    ToolCallParseStatus.OK,
    ToolCallParseStatus.INVALID_JSON,
    ToolCallParseStatus.MALFORMED_STRUCTURE,
)
_MARKS = re.compile(r'\\.|\\$|[{}"]', re.DOTALL)


class JsonBlock:
    """One call's block, fed as its text comes; `feed` gives what is new of the arguments."""

    def __init__(self, family: str, name: str | None = None) -> None:
        """`name` where the renderer reads it and not the block."""
        self._form = _JSON_FORMS.get(family)
        self._known_name = name
        self._head = ""
        self._waiting = ""
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._ended = False
        self.name = ""
        """Empty until the arguments have begun."""

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
            self.name = self._read_name(begun.groupdict())
            text = self._head[begun.end() :] if self.name else ""
        ready = self._take(text)
        if ready:
            self._pieces.append(ready)
        return ready

    def _read_name(self, found: dict[str, str | None]) -> str:
        if found.get("quoted"):
            name = parsed_arguments(found["quoted"] or "")
            return name if isinstance(name, str) and name[:1] != '"' else ""
        return found.get("name") or self._known_name or ""

    def _take(self, text: str) -> str:
        """Up to the object's end; white space at the end waits for what follows it."""
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


def new_call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


def read_call(family: str, attempt: ParsedToolCall) -> ToolCall | None:
    """None for an attempt that is no call: without a name, or without an object."""
    call_id = attempt.id or new_call_id()
    block = JsonBlock(family, attempt.name)
    block.feed(attempt.raw)
    if block.name:
        return ToolCall(call_id, block.name, block.arguments)
    if attempt.status not in _READABLE or not attempt.name or not isinstance(attempt.name, str):
        return None
    text = _object_text(attempt.arguments)
    return None if text is None else ToolCall(call_id, attempt.name, text)


def closes_of(family: str) -> tuple[str, str] | None:
    """The texts that would end an open call, for `open_calls`; None where they do not help."""
    return _XML_CLOSES.get(family)


def open_calls(
    family: str,
    ended: Sequence[ParsedToolCall],
    ended_within: Sequence[ParsedToolCall],
    tools: list[dict[str, Any]],
    held_chars: int,
) -> list[ToolCall]:
    """An open block's calls: what it would say if it ended now.

    `ended` and `ended_within` are readings of the block with either of its `closes_of`; of an
    argument that is still written the last `held_chars` wait.
    """
    if not ended or not ended_within:
        return []
    *whole, last = ended
    calls = [call for attempt in whole if (call := read_call(family, attempt))]
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
    return [*calls, ToolCall(new_call_id(), last.name, text)]


def _is_text(tools: list[dict[str, Any]], tool: str, key: str) -> bool:
    """Whether an argument is surely a string: any other may yet turn out to be JSON."""
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
    except orjson.JSONEncodeError:  # nested too deep, or an integer past 64 bits
        return None
