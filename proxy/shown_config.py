"""A configuration as people see it: without its secrets.

Invariant: no result contains the value of a key whose name is that of a secret, the user and the
password of a URL, or the value of `NAME=VALUE`, `name: VALUE` or `--name VALUE` where the name is
that of a secret; at any depth, in lists, too. Numbers of tokens and the paths of files of secrets
are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_CHARS = 500
"""Characters of a value that are shown."""
HIDDEN = "hidden"
"""What is shown in place of a secret."""
_ENDINGS = ("key", "secret", "token", "password", "passwd", "pwd", "passphrase", "credential")
"""Ends of the words that name a secret, in the singular."""
_SECTIONS = ("env", "auth", "headers", "dsn")
"""Words that name a section or a text that contains secrets."""
_LINES = ("authorization", "cookie", "cookies")
"""Words whose value goes on to the end of the line, as in `Authorization: Basic …`."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A password may contain `/` and `@`, unless the URL has no `:` before its first `/`. It is
# matched against a word up to its last `@`, so that the time is linear.
_USER = re.compile(r"//(?:[^/]*:.*|[^/?#]*)@")
_SECRET = rf"[\w.-]*(?:{'|'.join(_ENDINGS)})s?"
_SECTION = rf"(?:[\w.-]*[_.-])?(?:{'|'.join(_SECTIONS)})"
_LINE = rf"(?:[\w.-]*[_.-])?(?:{'|'.join(_LINES)})"
_IS = r"\\*[\"'\]]{0,2}\s*(?:={1,2}|:)\s*"
"""Between a name and its value; both may be in quotes, also in those of JSON in JSON."""
_NUMBER = r"\d[\d,.]*(?:[\s)\]};'\"&]|$)"
_COUNT = rf"(?!-*(?:[\w.-]*tokens(?:{_IS}|\s+)|token\s*:\s*){_NUMBER})"
"""Not a number of tokens."""
_FLAG = rf"-(?:{_SECRET}|{_SECTION}|{_LINE})\s+"
_NAMED = rf"(?>{_COUNT}(?:(?:{_SECRET}|{_SECTION}){_IS}|{_FLAG})|bearer\s+)"
_QUOTED = r"""[bfru]{0,2}(?:\\+'[^']*'?|\\+"[^"]*"?|'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)"""
_NESTED = r"\{(?:[^{}]|\{[^{}]*\})*+\}?|\[(?:[^\[\]]|\[[^\[\]]*\])*+\]?"
_REST = r"""(?:="[^"\n]*"|[^\r\n'"])*+"""
_ASSIGNED = re.compile(
    rf"(?is)(?<=[?&])({_COUNT}{_SECRET}=)([^\s&#'\"]*)"
    rf"|(?<![\w.-])(?:"
    rf"({_NAMED}*+{_LINE}{_IS})({_QUOTED}|{_NESTED}|{_REST})"
    rf"|({_NAMED}(?:{_NAMED}|(?:basic|digest|apikey)\s+)*+)"
    rf"((?:{_QUOTED})++|{_NESTED}|(?:[^\s'\"]|(?<=\w)['\"](?=\w))*+))"
)
"""The value of a URL's parameter, of a header, and of any other name of a secret. No part can fail
after the name, so that the time is linear; a value whose quote is not closed ends with the text."""


def flat_config(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`(key, value)` of a configuration, with dots between levels, and values as JSON."""
    for name, value in section.items():
        if value and is_secret(str(name), value):
            yield f"{prefix}{name}", HIDDEN
        elif isinstance(value, dict) and value:
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            shown = json.dumps(without_secrets(value), default=str, ensure_ascii=False)
            yield f"{prefix}{name}", shown[:MAX_CHARS]


def without_secrets(value: Any) -> Any:
    """A copy of a value of a configuration, such as a section, with `HIDDEN` for each secret."""
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if each and is_secret(str(name), each) else without_secrets(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        names = [None, *value]
        return [
            HIDDEN if _is_flag(name) else without_secrets(each)
            for name, each in zip(names, value, strict=False)
        ]
    return without_credentials(value) if isinstance(value, str) else value


def without_credentials(text: str) -> str:
    """A text without the credentials of its URLs, and without the values of named secrets.

    Example: without_credentials("http://:k@gpu:8001?token=t") == "http://gpu:8001?token=hidden"
    """
    return _ASSIGNED.sub(_hidden, re.sub(r"\S+", _without_user, text))


def shown_value(key: Iterable[str | int], value: object) -> str:
    """The end of a message about the value of a key: empty for a section and for a secret."""
    is_section = isinstance(value, Mapping | list | tuple)
    if is_section or any(is_secret(str(part), value) for part in key):
        return ""
    return f" (value: {without_secrets(value)!r})"


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a key of this name and value must not be shown."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] == "file":
        return False
    is_number = isinstance(value, int | float) and words[-1] != "token"
    if is_number:
        words = [word for word in words if "token" not in word]
    whole = (*_SECTIONS, *_LINES)
    return any(word in whole or word.removesuffix("s").endswith(_ENDINGS) for word in words)


def _without_user(word: re.Match[str]) -> str:
    before, at, after = word[0].rpartition("@")
    return _USER.sub("//", before + at) + after


def _hidden(found: re.Match[str]) -> str:
    name, value = (each for each in found.groups() if each is not None)
    return f"{name}{HIDDEN}" if value else name


def _is_flag(before: Any) -> bool:
    """Whether the argument after this one of a command is a secret: `--api-key`, VALUE."""
    return isinstance(before, str) and before[:1] == "-" and "=" not in before and is_secret(before)
