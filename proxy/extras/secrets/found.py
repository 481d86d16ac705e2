"""Secrets in one text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.extras.secrets.kinds import EMAIL, KINDS, MARKER, email_spans, field_kind, small_letters
from proxy.extras.secrets.library import library_spans

SURE_CHARS = 8
"""From here on a secret that was found elsewhere is masked within longer words, too."""
MASKED = "masked"
"""The kind of a secret that is a marker already."""
_MARKED = re.compile(rf"{re.escape(MARKER)}[^\]\s]{{1,80}}\]")
MAX_NESTED = 4
"""JSON texts within JSON texts that are read."""


@dataclass(frozen=True, slots=True, order=True)
class Secret:
    """The characters `[start, end)` of a text. Example: Secret(19, 26, "password")"""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a text has: the places of secrets, and the secrets of the JSON in it with their kinds,
    which the text may write in another form."""

    places: tuple[Secret, ...]
    nested: tuple[tuple[str, str], ...]


Within = Callable[[str], Found]


def find(text: str) -> tuple[Secret, ...]:
    """The secrets of a text in order; none overlaps another."""
    return places(text, within(text))


def within(text: str) -> Found:
    """The secrets of a text and of the JSON in it."""
    nested: list[tuple[str, str]] = []
    for key, value in nested_texts(text):
        if (kind := field_kind(key, value)) is not None:
            nested.append((value, kind))
        else:
            nested += ((value[each.start : each.end], each.kind) for each in _in_text(value))
    return Found(tuple(_in_text(text)), tuple(dict.fromkeys(nested)))


def places(text: str, found: Found) -> tuple[Secret, ...]:
    """Where these secrets stand in the text; disjoint."""
    nested = [
        place
        for secret, kind in found.nested
        for written in forms(secret)
        for place in occurrences(text, written, kind)
        if len(written) >= SURE_CHARS or stands_alone(text, place)
    ]
    return disjoint([*found.places, *nested])


def stands_alone(text: str, place: Secret) -> bool:
    """Whether no letter or digit is beside it."""
    around = text[max(0, place.start - 1) : place.start] + text[place.end : place.end + 1]
    return not any(char.isalnum() for char in around)


def masked(text: str, secrets: Iterable[Secret]) -> str:
    """`secrets`: in order and disjoint."""
    parts, end = list[str](), 0
    for secret in secrets:
        parts += [text[end : secret.start], f"{MARKER}{secret.kind}]"]
        end = secret.end
    return "".join([*parts, text[end:]]) if parts else text


def markers(text: str) -> list[Secret]:
    """Where a secret was masked before."""
    return [Secret(*each.span(), MASKED) for each in _MARKED.finditer(text)]


def disjoint(found: Iterable[Secret]) -> tuple[Secret, ...]:
    """The secrets in order; those that overlap are one, with the kind of the longest."""
    merged: list[Secret] = []
    longest = 0
    for each in sorted(found):
        if each.start >= each.end:
            continue
        if merged and each.start < merged[-1].end:
            last = merged[-1]
            kind = last.kind
            if each.end - each.start > longest:
                kind, longest = each.kind, each.end - each.start
            merged[-1] = Secret(last.start, max(last.end, each.end), kind)
        else:
            merged.append(each)
            longest = each.end - each.start
    return tuple(merged)


def nested_texts(text: str, depth: int = MAX_NESTED) -> Iterator[tuple[str, str]]:
    """The strings within a text that is JSON, each with the key that it stands under; at any
    depth, also JSON within these strings."""
    if depth and text.lstrip()[:1] in ("{", "[", '"'):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return
        yield from _strings(value, "", depth)


def _strings(value: Any, key: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
        yield from nested_texts(value, depth - 1)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, key, depth)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield "", name
            yield from _strings(each, name, depth)


def _in_text(text: str) -> Iterator[Secret]:
    if len(text) < 4:
        return
    low = small_letters(text)
    for kind in KINDS:
        for start, end in kind.spans(text, low):
            yield Secret(start, end, kind.name)
    for start, end in email_spans(text):
        yield Secret(start, end, EMAIL)
    for start, end, name in library_spans(text):
        yield Secret(start, end, name)


def forms(secret: str) -> list[str]:
    """The secret, and how it is written within JSON, JSON within JSON, and so on."""
    found = [secret]
    for _ in range(MAX_NESTED):
        found.append(orjson.dumps(found[-1]).decode()[1:-1])
        if found[-1] == found[-2]:
            return found[:-1]
    return found


def occurrences(text: str, secret: str, kind: str) -> Iterator[Secret]:
    at = text.find(secret)
    while at >= 0:
        yield Secret(at, at + len(secret), kind)
        at = text.find(secret, at + len(secret))
