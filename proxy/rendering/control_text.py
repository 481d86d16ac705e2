"""Text of users and tools that spells a control token is encoded as ordinary text.

A tool's result may contain `<|im_end|>\\n<|im_start|>assistant`, by chance or to forge a turn.
Templates and renderers write messages and control tokens into one text, so the texts of users and
tools are marked before they are rendered: `MUTE` is put into each control token that they spell,
and the tokenizer encodes such a text without its control tokens, and without the marks.

Invariant: the ids of a muted text decode to the text without marks, none of them is a control token
that a mark is in, and they depend on the text alone. A text without control tokens is not touched,
and no text can hold a mark of its own: the mark is drawn when the process starts.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson
from tokenizers import Tokenizer as FastTokenizer

NONCHARACTERS = "".join(map(chr, [0xFDD0, *range(0xFDD2, 0xFDF0)]))
"""Noncharacters of Unicode: no vocabulary has a token for them. U+FDD1 is left out. It stands for
images (`conversation.images.MARK`), and a muted text must not look as if it had one. Any text may
contain the others, for example one about Unicode."""
MUTE = "".join(secrets.choice(NONCHARACTERS) for _ in range(16))
"""79 random bits, written as noncharacters."""


class ControlText:
    """The control tokens of one vocabulary."""

    def __init__(self, fast: FastTokenizer, template: str) -> None:
        """`template` is the chat template. Added tokens that are not special, such as `<think>`,
        are control tokens if it writes them; others are text that has a token of its own."""
        self._fast = fast
        self._added = {
            token.content: (number, token)
            for number, token in fast.get_added_tokens_decoder().items()
            if token.content.strip()
        }
        controls = [
            content
            for content, (_, token) in self._added.items()
            if len(content) > 1 and (token.special or content in template)
        ]
        self._controls = _any_of(controls)
        self._splits = _any_of(list(self._added))
        self._plain: FastTokenizer | None = None

    def muted(self, text: str) -> tuple[str, int]:
        """The text with its control tokens marked, and their number."""
        if self._controls.search(text) is None:
            return text, 0
        return self._controls.subn(_mark, text)

    def encode(self, muted: str) -> list[int]:
        """The ids of a text with marks, or of one that contains such a text."""
        ids: list[int] = []
        at, strips = 0, False
        for found in [*self._splits.finditer(muted), None]:
            part = muted[at:] if found is None else muted[at : found.start()]
            part = part.lstrip() if strips else part
            if found is None:
                return ids + self._ordinary(part)
            number, token = self._added[found[0]]
            ids += self._ordinary(part.rstrip() if token.lstrip else part)
            ids.append(number)
            at, strips = found.end(), token.rstrip
        return ids

    def _ordinary(self, part: str) -> list[int]:
        text = part.replace(MUTE, "")
        if not text:
            return []
        if self._plain is None:
            self._plain = _without_added(self._fast)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


def _mark(found: re.Match[str]) -> str:
    return f"{found[0][0]}{MUTE}{found[0][1:]}"


def _any_of(texts: list[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _without_added(fast: FastTokenizer) -> FastTokenizer:
    """The same vocabulary, without the tokens that are found in a text before it is split."""
    config: dict[str, Any] = orjson.loads(fast.to_str())
    config["added_tokens"] = []
    config["post_processor"] = None
    return FastTokenizer.from_str(orjson.dumps(config).decode())
