"""The parameters of the page's requests, checked.

Each function raises RequestError for a value that it cannot use.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from aiohttp import web

from proxy.errors import RequestError
from proxy.extras.view.trial_filter import TrialFilter

MAX_TURN = 2**31 - 1
MAX_DIGITS = 19
"""Digits of an integer, which then has at most 64 bits."""
E = TypeVar("E", bound=StrEnum)


def session_id(request: web.Request) -> str:
    return request.query.get("session", "")


def turn_index(request: web.Request) -> int:
    return count(request, "turn", -1, most=MAX_TURN, least=0)


def count(request: web.Request, name: str, default: int, *, most: int, least: int = 1) -> int:
    return integer(request.query.get(name, str(default)), name, most=most, least=least)


def integer(text: str, name: str, *, most: int, least: int = 0) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS:
        value = int(text)
        if least <= value <= most:
            return value
    raise RequestError(f"{name}: {text[:40]!r} is not an integer from {least} to {most}")


def turn_indexes(request: web.Request, most: int) -> list[int]:
    """The first `most` turns of a list such as `0,3`."""
    given = request.query.get("turns", "").split(",")[:most]
    return [integer(each, "turns", most=MAX_TURN) for each in given if each]


def number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name}: {text[:40]!r} is not a number") from None


def choice(value: str | None, kind: type[E]) -> E | None:
    if not value:
        return None
    try:
        return kind(value)
    except ValueError:
        raise RequestError(f"{value[:40]!r} is not one of {', '.join(kind)}") from None


def trial_filter(request: web.Request) -> TrialFilter:
    query = request.query
    low, high = (
        number(query[name], name) if query.get(name) else None
        for name in ("min_reward", "max_reward")
    )
    return TrialFilter(
        kind=query.get("kind", ""),
        status=query.get("status", ""),
        source=query.get("source", ""),
        task=query.get("task", ""),
        text=query.get("text", ""),
        min_reward=low,
        max_reward=high,
        min_tokens=count(request, "min_tokens", 0, most=2**40, least=0),
        errors=bool(query.get("errors")),
    )
