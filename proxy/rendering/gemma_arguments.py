"""Gemma 4's notation for the arguments of a call, finished or not, as JSON.

    {command:<|"|>ls -l<|"|>,depth:2,all:true}    →    {"command":"ls -l","depth":2,"all":true}

Invariant: while the text grows, the JSON only grows. A number or a word is therefore converted when
the character after it is known. From a mistake on, the text is returned as written.
"""

from __future__ import annotations

import json
import re

import orjson

_QUOTE = '<|"|>'
_KEY = re.compile(r"[^:,{}\[\]]*")
_LITERAL = re.compile(r"[^,}\]]*")
_CLOSES = {"{": "}", "[": "]"}


def gemma_arguments(text: str, *, unfinished: bool) -> str:
    """`text` begins with `{`; what follows its object is ignored. If more text may follow
    (`unfinished`), the possible beginning of a closing quote is held back."""
    return _Arguments(text, unfinished).to_json()


class _Arguments:
    def __init__(self, text: str, unfinished: bool) -> None:
        self._text = text
        self._unfinished = unfinished
        self._at = 0
        self._out: list[str] = []
        self._open: list[str] = []
        """The closing brackets of the open objects and arrays."""

    def to_json(self) -> str:
        try:
            self._value()
            while self._open:
                self._member()
        except _EndOfTextError:
            pass
        except _MistakeError:
            self._out.append(self._text[self._at :])
        return "".join(self._out)

    def _member(self) -> None:
        """What follows within the innermost object or array: its end, or one more value."""
        char, before = self._peek(), self._out[-1]
        if char == self._open[-1] and before != ",":
            self._open.pop()
            self._take(char)
        elif before == "," or before in _CLOSES:
            if self._open[-1] == "}":
                self._key()
            self._value()
        elif char == ",":
            self._take(char)
        else:
            raise _MistakeError

    def _key(self) -> None:
        if self._begins_with_quote():
            self._string()
            if self._peek() != ":":
                raise _MistakeError
        else:
            key = self._matched(_KEY)
            if self._text[self._at + len(key)] != ":" or not key.strip():
                raise _MistakeError
            self._at += len(key)
            self._out.append(orjson.dumps(key.strip()).decode())
        self._take(":")

    def _value(self) -> None:
        char = self._peek()
        if char in _CLOSES:
            self._take(char)
            self._open.append(_CLOSES[char])
        elif self._begins_with_quote():
            self._string()
        else:
            literal = self._matched(_LITERAL)
            if not literal.strip():
                raise _MistakeError
            self._at += len(literal)
            self._out.append(_literal(literal.strip()))

    def _string(self) -> None:
        """Appends the string, or its part that is known, without the quote that closes it."""
        start = self._at + len(_QUOTE)
        end = self._text.find(_QUOTE, start)
        text = self._text[start:] if end < 0 else self._text[start:end]
        if end < 0 and self._unfinished:
            held = (n for n in range(len(_QUOTE) - 1, 0, -1) if text.endswith(_QUOTE[:n]))
            text = text[: len(text) - next(held, 0)]
        quoted = orjson.dumps(text).decode()
        self._out.append(quoted[:-1] if end < 0 else quoted)
        if end < 0:
            raise _EndOfTextError
        self._at = end + len(_QUOTE)

    def _begins_with_quote(self) -> bool:
        begins = self._text[self._at : self._at + len(_QUOTE)]
        if begins != _QUOTE and _QUOTE.startswith(begins):
            raise _EndOfTextError  # the rest of the quote may follow
        return begins == _QUOTE

    def _peek(self) -> str:
        """The next character that is not white space."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        if self._at == len(self._text):
            raise _EndOfTextError
        return self._text[self._at]

    def _take(self, char: str) -> None:
        self._at += 1
        self._out.append(char)

    def _matched(self, form: re.Pattern[str]) -> str:
        """The text that matches, if the character after it is known."""
        found = form.match(self._text, self._at)
        if found is None or found.end() == len(self._text):
            raise _EndOfTextError
        return found[0]


def _literal(text: str) -> str:
    """A number, `true`, `false` or `null` as it is; any other word as a string."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # an integer beyond 64 bits
        return text


class _EndOfTextError(Exception):
    """The rest is not known yet."""


class _MistakeError(Exception):
    """The text is not in the notation from here on."""
