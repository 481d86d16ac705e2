"""JSON of agents, of other trainers and of other programs, as the page and a store can take it.

Invariant: what `valid_json` returns can be written as JSON for any reader: texts have no lone
surrogates, integers have at most 64 bits, and there are at most `MAX_LEVELS` levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
from pydantic import ConfigDict

CLOSED = ConfigDict(extra="forbid")
"""Of a typed dictionary: what it describes has no key that the schema lacks."""
OPEN = ConfigDict(extra="allow")
MAX_LEVELS = 100
"""Levels of objects and lists that are kept; a deeper value is null. orjson writes 254."""
_INTEGERS = range(-(2**63), 2**64)


def valid_text(text: str) -> str:
    """The text with `?` in place of each lone surrogate, which has no UTF-8."""
    return text.encode(errors="replace").decode()


def valid_json(value: Any, levels: int = MAX_LEVELS) -> Any:
    """A copy that can be written as JSON. A larger integer is a float, or null beyond its range."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int):
        return value if value in _INTEGERS else _as_float(value)
    if isinstance(value, dict | list | tuple) and not levels:
        return None
    if isinstance(value, dict):
        return {valid_text(str(k)): valid_json(each, levels - 1) for k, each in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(each, levels - 1) for each in value]
    return value


def read_json(raw: bytes) -> Any:
    """The value of a JSON text, valid; None for anything else. Bytes that are not UTF-8 are
    replaced, and NaN is read as Python writes it."""
    try:
        if raw.count(b"[") + raw.count(b"{") <= MAX_LEVELS:
            return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return valid_json(json.loads(raw.decode(errors="replace")))
    except (ValueError, RecursionError):
        return None


def write_json(value: object, *, default: Callable[[Any], Any] | None = None) -> bytes:
    """The value as JSON; it is made valid if it is not. `default`: writes what is not JSON."""
    try:
        return orjson.dumps(value, default, orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return orjson.dumps(valid_json(value), default, orjson.OPT_SERIALIZE_NUMPY)


def _as_float(value: int) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None
