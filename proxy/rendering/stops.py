"""Stop strings in text that is still growing."""

from __future__ import annotations


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first of the strings begins, and which it is."""
    found = [(text.find(string), string) for string in stop if string in text]
    return min(found, default=None)


def begun(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of the strings begins with."""
    longest = 0
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
