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

import yaml

MAX_CHARS = 500
"""Characters of a value that are shown."""
HIDDEN = "hidden"
"""What is shown in place of a secret."""
_ENDINGS = ("key", "secret", "token", "password", "passwd", "pwd", "passphrase", "credential")
"""Ends of the words that name a secret, in the singular."""
_WHOLE = frozenset({"env", "auth", "authorization", "cookie", "headers", "dsn"})
"""Words that name a section or a text that contains secrets."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A password may contain `/` and `@`, unless the URL has no `:` before its first `/`.
_USER = re.compile(r"//(?:[^\s/]*:\S*|[^\s/?#]*)@")
_NAMED = rf"[\w.-]*(?:{'|'.join(_ENDINGS)})s?"
_BEFORE = rf"{_NAMED}\s*=\s*|{_NAMED}[\"']?:\s*(?!\d+\b)|-{_NAMED}\s+|bearer\s+"
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])({_BEFORE})(?:'[^']*'|\"[^\"]*\"|[^\s&#;'\"]+)")


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
    return _ASSIGNED.sub(rf"\g<1>{HIDDEN}", _USER.sub("//", text))


def shown_value(key: Iterable[str | int], value: object) -> str:
    """The end of a message about the value of a key: empty for a section and for a secret."""
    is_section = isinstance(value, Mapping | list | tuple)
    if is_section or any(is_secret(str(part), value) for part in key):
        return ""
    return f" (value: {without_secrets(value)!r})"


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the lines of the file, which may contain a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return "it contains characters that YAML does not allow"
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a key of this name and value must not be shown."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] == "file":
        return False
    is_number = isinstance(value, int | float) and words[-1] != "token"
    if is_number:
        words = [word for word in words if "token" not in word]
    return any(word in _WHOLE or word.removesuffix("s").endswith(_ENDINGS) for word in words)


def _is_flag(before: Any) -> bool:
    """Whether the argument after this one of a command is a secret: `--api-key`, VALUE."""
    return isinstance(before, str) and before[:1] == "-" and "=" not in before and is_secret(before)
