"""The secrets that were found in a session, to be masked wherever else they stand in it."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import quote, quote_plus

import orjson

from proxy.conversation.images import blanked
from proxy.extras.secrets.found import (
    SURE_CHARS,
    Secret,
    Within,
    disjoint,
    forms,
    masked,
    occurrences,
    places,
    stands_alone,
    within,
)
from proxy.extras.secrets.kinds import MARKER, field_kind, looks_random

LEAST_CHARS = 6
"""Shorter secrets are masked only where they are found."""
PLAIN_CHARS = 12
"""Shorter secrets of small letters only may be words, and are masked where they stand alone."""
CUT = "cut"
"""The kind of a part of a secret at the end of a piece of text."""
MOST = 2_000
"""Secrets of one session that are remembered, the first ones."""
LINE_CHARS = 24
"""Lines of a secret of several lines that are remembered by themselves."""
_WORD = re.compile(
    "passwords?|secrets?|postgres|username|changeme|example|guest|default|admin|administrator|"
    "testing|localhost|development|production|private|public"
)


class Known:
    """Example:
    known = Known()
    known.learn("DB_PASSWORD=x7!kPq2")
    known.mask("I try x7!kPq2.")            "I try [secret:password]."
    """

    def __init__(self, within: Within = within) -> None:
        """`within`: finds the secrets of a text."""
        self._within = within
        self._kinds: dict[str, str] = {}
        self._written: dict[str, tuple[str, bool]] = {}
        """Form → kind, and whether it must stand alone."""

    def __len__(self) -> int:
        return len(self._kinds)

    def learn(self, text: str) -> None:
        """Remembers the secrets of a text, and of the JSON in it."""
        text = blanked(text)
        found = self._within(text)
        for place in found.places:
            self.add(text[place.start : place.end], place.kind)
        for secret, kind in found.nested:
            self.add(secret, kind)

    def add(self, secret: str, kind: str) -> None:
        """Remembers one secret."""
        for each in _parts(secret):
            if len(self._kinds) >= MOST or each in self._kinds:
                continue
            self._kinds[each] = kind
            plain = each.isalpha() and each.islower() and len(each) < PLAIN_CHARS
            alone = len(each) < SURE_CHARS or plain
            for written in _written(each):
                self._written.setdefault(written, (kind, alone))

    def find(self, text: str) -> tuple[Secret, ...]:
        """The secrets of a text, and those that are remembered. None is in what stands for an
        image."""
        text = blanked(text)
        return disjoint([*places(text, self._within(text)), *self._known(text)])

    def mask(self, text: str) -> str:
        """The text with a marker in the place of each of these, and else as it is. JSON stays
        JSON: it is written anew only where markers in its text would break it, or leave something.
        """
        found = self.find(text)
        marked = masked(text, found)
        if found and text.lstrip()[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                orjson.loads(text)  # no half surrogate pairs, which could not be written
                if not self._is_masked(marked):
                    return _dumped(self.mask_value(json.loads(text)))
        return marked

    def _is_masked(self, text: str) -> bool:
        """Whether the text is JSON without anything to mask."""
        try:
            value = orjson.loads(text)
        except ValueError:
            return False
        return bool(self.mask_value(value) == value)

    def mask_value(self, value: Any) -> Any:
        """The value of JSON with markers in its strings, at any depth, and in the place of what
        has the name of a secret."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, list | tuple):
            return [self.mask_value(each) for each in value]
        if isinstance(value, Mapping):
            masked_: dict[str, Any] = {}
            for name, each in value.items():
                masked_[_apart(self.mask(name), masked_)] = self._field(name, each)
            return masked_
        return value

    def _field(self, name: str, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kind = field_kind(name, str(value)) if is_number or isinstance(value, str) else None
        return f"{MARKER}{kind}]" if kind else self.mask_value(value)

    def mask_piece(self, text: str) -> str:
        """The same for a piece of a longer text, which may begin or end within a secret that is
        remembered."""
        first, last = 0, len(text)
        for written in self._written:
            for size in range(min(len(written) - 1, len(text)), LEAST_CHARS - 1, -1):
                if text.startswith(written[-size:]):
                    first = max(first, size)
                if text.endswith(written[:size]):
                    last = min(last, len(text) - size)
        if first == 0 and last == len(text):
            return self.mask(text)
        ends = [Secret(0, first, CUT), Secret(max(first, last), len(text), CUT)]
        return masked(text, disjoint([*ends, *self.find(text)]))

    def _known(self, text: str) -> Iterator[Secret]:
        for written, (kind, alone) in self._written.items():
            if written in text:
                for found in occurrences(text, written, kind):
                    if not alone or stands_alone(text, found):
                        yield found


def _apart(name: str, others: Mapping[str, Any]) -> str:
    """The name, or one beside it if others have it, because several were masked alike."""
    names = (name if n == 1 else f"{name}#{n}" for n in count(1))
    return next(each for each in names if each not in others)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def mask(text: str) -> str:
    """The text with `[secret:KIND]` in the place of each secret that it has."""
    known = Known()
    known.learn(text)
    return known.mask(text)


def _parts(secret: str) -> Iterator[str]:
    """The secret as it is remembered, the lines of one of several lines, and the values in one that
    has several, as cookies do."""
    whole = secret.strip()
    if MARKER in whole or len(whole) < LEAST_CHARS or _WORD.fullmatch(whole.lower()):
        return
    yield whole
    lines = re.findall(rf"[A-Za-z0-9+/=]{{{LINE_CHARS},}}", re.sub(r"\\+[rnt]", "\n", whole))
    if len(lines) > 1:
        yield from lines
        return
    yield from (part for part in re.split(r"[\s;=,&]+", whole)[1:] if looks_random(part))


def _written(secret: str) -> Iterator[str]:
    """How the secret may be written: as it is, in JSON, in an address, in HTML, in a shell's
    quotes, in base64."""
    yield from forms(secret)
    yield from (quote(secret, safe=""), quote(secret), quote_plus(secret))
    yield html.escape(secret)
    yield secret.replace("'", "'\\''")
    yield secret.replace("'", "'\"'\"'")
    if not secret.isascii():
        yield from forms(json.dumps(secret)[1:-1])
    if len(secret) >= SURE_CHARS:
        yield (
            base64.b64encode(secret.encode(errors="replace"))
            .decode()
            .rstrip("=")[: len(secret) * 4 // 3]
        )
