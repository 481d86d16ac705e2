"""The simple commands of a shell's command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

_ENDS = ";&|()\n"
"""What stands between simple commands."""
_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})


def simple_commands(command: str) -> Iterator[str]:
    """The simple commands in order, also those of a script that a shell gets as an argument. Quotes
    are gone; one without an end is not minded.

    Example: `cd web && npm test | tail` → `cd web`, `npm test`, `tail`
    """
    words: list[str] = []
    for word in [*_words(command), _ENDS[0]]:
        if word.strip(_ENDS):
            words.append(word)
            continue
        if words:
            yield from _unwrapped(words)
        words = []


def _words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=_ENDS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:  # a quote without an end, as in a heredoc
        return re.findall(rf"[{re.escape(_ENDS)}]+|[^\s{re.escape(_ENDS)}]+", command)


def _unwrapped(words: list[str]) -> Iterator[str]:
    name = words[0].rpartition("/")[2]
    options = (at for at, word in enumerate(words) if re.fullmatch(r"-\w*c", word))
    at = next(options, None)
    if name in _SHELLS and at is not None and at + 1 < len(words):
        yield from simple_commands(words[at + 1])
    else:
        yield " ".join(words)
