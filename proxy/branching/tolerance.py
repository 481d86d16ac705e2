"""Decides which differences between a request and the recorded one do not count.

Two texts are the same request if they are equal outside of what the profile's `tolerate` matches,
and outside of the names that stand for each other: the ids of the branch and of its origins, and
the folders in which their agents work. Invariant: what is tolerated is found and reported by the
same expression, so that nothing is tolerated without being reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.conversation.images import MARK, mark, parts
from proxy.settings.profiles import AgentProfile

SHOWN_CHARS = 200
"""Characters that are recorded of each side of a tolerated difference."""
_ESCAPED = {r"\n": "\n\1\n", r"\r": "\n\2\n", r"\t": "\t\1\t"}
_HIDES_A_WORD = re.compile(r"\\[nrt]|(?:\x1b|\\u001b)\[[\d;]*[A-Za-z]")
"""What ends in a letter and is no part of the word that follows it: a line break or tab that is
escaped, as in results that an agent sends as JSON, and the codes of a terminal's colours."""
_PADDING = r"[ \t]*"
"""Blanks up to the next column or tab stop: their number depends on what is before them."""
MIN_NAME_CHARS = 4
"""Shorter ids and folders are compared like any text: they may be part of any word."""


@dataclass(frozen=True, slots=True)
class Tolerated:
    """Example: Tolerated("duration", recorded="0.21 s", seen="0.19 s")"""

    name: str
    recorded: str
    seen: str


class Tolerance:
    """The differences that do not count in one branch."""

    def __init__(self, profile: AgentProfile, names: Mapping[str, Sequence[str]]) -> None:
        """`names`: kind → texts that stand for each other, such as the sessions' ids."""
        parts = []
        for kind, same in names.items():
            known = sorted({n for n in same if len(n) >= MIN_NAME_CHARS}, key=len, reverse=True)
            if known:
                parts.append(f"(?P<{kind}>{'|'.join(map(re.escape, known))})")
        for name, patterns in profile.tolerate.items():
            found = "|".join(pattern.pattern for pattern in patterns)
            parts.append(f"(?P<{name}>(?:{found}){_PADDING})")
        self._pattern = re.compile("|".join(parts)) if parts else None

    def masked(self, text: str) -> str:
        """The text with a mark in the place of everything that may differ."""
        if self._pattern is None:
            return text
        if MARK not in text:
            return self._masked(self._pattern, text)
        return "".join(
            self._masked(self._pattern, part) + (mark(image) if image else "")
            for part, image in parts(text)
        )

    def differences(self, recorded: str, seen: str) -> list[Tolerated]:
        """The tolerated differences of two texts that are equal when masked."""
        if self._pattern is None or recorded == seen:
            return []
        pairs = zip(self._found(recorded), self._found(seen), strict=True)
        return [
            Tolerated(
                str(one.lastgroup), *(each[0].rstrip(" \t")[:SHOWN_CHARS] for each in (one, other))
            )
            for one, other in pairs
            if one[0] != other[0]
        ]

    @staticmethod
    def _masked(pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda found: f"\0{found.lastgroup}\0", _with_words(text))

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        assert self._pattern is not None
        for part, _ in parts(text):
            yield from self._pattern.finditer(_with_words(part))


def _with_words(text: str) -> str:
    """The text with a mark where a word or line begins that expressions would not see. Texts that
    differ still differ."""
    return _HIDES_A_WORD.sub(lambda found: _ESCAPED.get(found[0], f"{found[0]}\1"), text)
