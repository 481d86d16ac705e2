"""Decides whether two JSON texts have the same value.

An agent parses the arguments of a tool call and serialises them again in its own language.
Invariant: a value is equal to the result of JavaScript's JSON.parse and JSON.stringify: `1.0` and
`1`, `1e3` and `1000`, `-0` and `0` are equal, and integers beyond 2^53 that round to the same
double.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

MAX_ARGUMENT_DEPTH = 100
"""Levels of objects and lists in a call's arguments; deeper ones are text. It leaves room, in every
dialect's answer and in the engine's request, below the 254 levels that can be written."""
MAX_ARGUMENT_VALUES = 50_000
"""Commas, objects and lists in a call's arguments; arguments with more are text. Reading and
writing 50,000 takes about 20 ms, and every request repeats the history's calls."""
MAX_ARGUMENT_CHARS = 1_000_000
"""Characters of a call's arguments; longer ones are text. Comparing a million takes about 20 ms."""
MAX_SAFE_INTEGER = 2**53
"""Above this a double cannot represent every integer."""


def parsed_arguments(text: str) -> Any:
    """A tool call's arguments as a JSON value.

    Invalid JSON, and JSON with more than MAX_ARGUMENT_DEPTH levels, MAX_ARGUMENT_VALUES values or
    MAX_ARGUMENT_CHARS characters, is returned unchanged; an empty string becomes `{}`.
    """
    if len(text) > MAX_ARGUMENT_CHARS:
        return text
    if not text.strip():
        return {}
    if text.count(",") + text.count("{") + text.count("[") > MAX_ARGUMENT_VALUES:
        return text
    try:
        value = loads(text)
    except orjson.JSONDecodeError:
        return text
    if text.count("{") + text.count("[") > MAX_ARGUMENT_DEPTH and is_deeper(
        value, MAX_ARGUMENT_DEPTH
    ):
        return text
    return value


def read_arguments(text: str) -> Any:
    """The same, also of JSON with line breaks and tabs as they are in its strings, which models
    write and which agents with a lenient parser read."""
    value = parsed_arguments(text)
    if value is not text or not _CONTROL.search(text) or len(text) > MAX_ARGUMENT_CHARS:
        return value
    escaped = _STRING.sub(lambda found: _IN_STRING.sub(_as_escape, found[0]), text)
    value = parsed_arguments(escaped)
    return text if value is escaped else value


def _as_escape(found: re.Match[str]) -> str:
    return found[0] if found[0][0] == "\\" else f"\\u{ord(found[0]):04x}"


_CONTROL = re.compile(r"[\x00-\x1f]")
_IN_STRING = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, also one that does not end: each character is looked at once."""


def loads(data: str | bytes) -> Any:
    """What is written as JSON. Half a surrogate pair, which JavaScript can write and UTF-8 cannot,
    and bytes that are not UTF-8 become U+FFFD; a byte order mark is skipped.

    Raises orjson.JSONDecodeError.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        mended = _mended(data)
        if mended == data:
            raise
        return orjson.loads(mended)


def _mended(data: str | bytes) -> str | bytes:
    if isinstance(data, bytes):
        if b"\\u" not in data and data.isascii():
            return data
        data = _SURROGATES.sub(_as_utf8, data).decode("utf-8", "replace")
    text = data.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    return _ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape, or two that are a surrogate pair."""
_SURROGATES = re.compile(
    rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]|\xed[\xa0-\xbf][\x80-\xbf]"
)
"""Surrogates that were written as if they were characters: a pair, or half of one."""


def _as_utf8(found: re.Match[bytes]) -> bytes:
    pair = found[0].decode("utf-8", "surrogatepass")
    return pair.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def canonical_arguments(text: str) -> bytes:
    """The same bytes for equal arguments. Arguments that are not an object count as `{"arguments":
    value}`, because dialects that require an object send them in this form."""
    value = read_arguments(text)
    if not isinstance(value, dict):
        value = {"arguments": value}
    if len(text) <= MAX_ARGUMENT_CHARS and _SPELT_NUMBER.search(text):
        value = _canonical(value)
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def canonical_json(value: Any) -> bytes:
    """The same bytes for equal values of JSON."""
    return orjson.dumps(_canonical(value), option=orjson.OPT_SORT_KEYS)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether what was read from JSON has more than `levels` levels of objects and lists."""
    level = [value] if isinstance(value, dict | list) else []
    while level and levels:
        levels -= 1
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each)
            if type(inner) is dict or type(inner) is list
        ]
    return bool(level)


_SPELT_NUMBER = re.compile(r"[0-9][.eE]|-0|[0-9]{16}")
"""JSON without a match writes equal numbers in the same way."""


def _canonical(value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    double = float(value)
    return int(double) if double.is_integer() and abs(double) <= MAX_SAFE_INTEGER else double
