"""The parameters of the page's requests, checked.

Each function raises RequestError for a value that it cannot use.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from aiohttp import web

from proxy.errors import RequestError
from proxy.view.trial_filter import TrialFilter

E = TypeVar("E", bound=StrEnum)


def session_id(request: web.Request) -> str:
    return request.query.get("session", "")


def turn_index(request: web.Request) -> int:
    return count(request, "turn", -1, most=2**31 - 1, least=0)


def count(request: web.Request, name: str, default: int, *, most: int, least: int = 1) -> int:
    given = request.query.get(name, str(default))
    if not (given.isascii() and given.isdecimal()) or not least <= int(given[:20]) <= most:
        raise RequestError(f"{name}: {given[:40]!r} is not an integer from {least} to {most}")
    return int(given)


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
