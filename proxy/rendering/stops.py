"""Finds stop strings in growing text."""

from __future__ import annotations


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """The position of the first stop string, and the string; None if there is none."""
    found = [(text.find(string), string) for string in stop if string in text]
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
