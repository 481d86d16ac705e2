"""Finds stop strings in growing text."""

from __future__ import annotations


def first_stop(text: str, stop: tuple[str, ...], since: int = 0) -> tuple[int, str] | None:
    """The position of the first stop string that begins at `since` or later, and the string; None
    if there is none."""
    found = [(at, string) for string in stop if (at := text.find(string, since)) >= 0]
    return min(found, default=None)


def begun(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = 0
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
