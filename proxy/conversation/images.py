"""Images in the texts of messages.

A message that has an image holds a mark in its text: the sha256 of the image's bytes between two
noncharacters of Unicode. So whatever compares, stores and repeats texts does so with images, too,
and their bytes are nowhere in messages, keys and logs. Invariant: the texts of users and tools have
no marks but those that images were given (`wire.images.settle`). In an assistant's text a mark is
only what the model has sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from proxy.conversation.messages import Message

MARK = "\ufdd1"
"""A noncharacter, which no text should contain."""
_MARKED = re.compile(f"{MARK}([0-9a-f]{{64}}){MARK}")


def mark(sha256: str) -> str:
    """What stands for an image in a message's text."""
    return f"{MARK}{sha256}{MARK}"


def joined_blocks(texts: Iterable[str]) -> str:
    """The texts of a message's blocks: texts are on lines of their own; an image stands directly
    between the texts around it, as in chat templates."""
    out, is_first, after_image = list[str](), True, False
    for text in texts:
        if not (is_first or after_image or text.startswith(MARK)):
            out.append("\n")
        out.append(text)
        is_first, after_image = False, text.endswith(MARK) if text else after_image
    return "".join(out)


def parts(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a text, as (text before an image, its sha256), and (last text, "")."""
    at = 0
    for found in _MARKED.finditer(text):
        yield text[at : found.start()], found[1]
        at = found.end()
    yield text[at:], ""


def named(messages: Iterable[Message]) -> list[str]:
    """The sha256 of each image in the messages, in order, as often as it is there."""
    return [
        found
        for each in messages
        if MARK in each.text and each.role != "assistant"
        for found in _MARKED.findall(each.text)
    ]


def rewritten(text: str, by: Callable[[str], str]) -> str:
    """The text with `by(sha256)` in place of each image: a mark, or a text, which then is on lines
    of its own."""
    blocks = [block for before, sha256 in parts(text) for block in (before, sha256 and by(sha256))]
    return joined_blocks(block for block in blocks if block) if MARK in text else text


def replaced(text: str, by: Callable[[str], str]) -> str:
    """The text with `by(sha256)` in place of each image."""
    return _MARKED.sub(lambda found: by(found[1]), text) if MARK in text else text


def shown(text: str) -> str:
    """The text for people and searches: the word `[image]` in the place of each image."""
    return replaced(text, lambda _: " [image] ").strip() if MARK in text else text


def told_apart(text: str) -> str:
    """The text for people who compare it with another one: `[image 9f86d0818f5e]` in the place of
    each image, with the first digits of its sha256."""
    return replaced(text, lambda sha256: f"[image {sha256[:12]}]")


def blanked(text: str) -> str:
    """The text with line breaks in the place of each image, of the same length."""
    return replaced(text, lambda _: "\n" * _LENGTH)


def uncut(text: str, end: int) -> int:
    """The largest number of characters, at most `end`, that cuts no image."""
    for found in _MARKED.finditer(text, max(0, end - _LENGTH), min(len(text), end + _LENGTH)):
        if found.start() < end < found.end():
            return found.start()
    return end


_LENGTH = len(mark("0" * 64))
