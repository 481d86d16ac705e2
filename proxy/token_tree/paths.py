"""Assembles a turn's path from the tokens that each turn on it added."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from proxy.records import EMPTY_IDS, Ids, ImageSpan
from proxy.records.images import moved, within

MIN_TOKENS = 2048
"""A shorter prompt costs less than its buffer."""


class OwnTokens(Protocol):
    """The tokens that one turn adds to its parent's path (see `records`)."""

    @property
    def parent(self) -> int | None: ...

    @property
    def shared_tokens(self) -> int: ...

    @property
    def prompt_ids(self) -> Ids: ...

    @property
    def sampled_ids(self) -> Ids: ...

    @property
    def images(self) -> tuple[ImageSpan, ...]: ...

    @property
    def path_tokens(self) -> int: ...


def path(turns: Sequence[OwnTokens], index: int) -> Ids:
    """The whole path of the turn `index` including its answer, `[T]`."""
    return prefix(turns, index, turns[index].path_tokens)


def prefix(turns: Sequence[OwnTokens], index: int | None, length: int, new: Ids = EMPTY_IDS) -> Ids:
    """The first `length` tokens of a turn's path, followed by `new`, `[length + len(new)]`."""
    spans: list[Ids] = [new]
    while index is not None and length > 0:
        turn = turns[index]
        own, prompt = length - turn.shared_tokens, turn.prompt_ids
        if own > 0:
            if own > len(prompt):
                spans.append(turn.sampled_ids[: own - len(prompt)])
            spans.append(prompt[:own])
            length = turn.shared_tokens
        index = turn.parent
    return np.concatenate(spans[::-1])


def prefix_images(
    turns: Sequence[OwnTokens], index: int | None, length: int
) -> tuple[ImageSpan, ...]:
    """The images in the first `length` tokens of a turn's path. Raises ImageError: `length` cuts
    one."""
    found: list[ImageSpan] = []
    while index is not None and length > 0:
        turn = turns[index]
        if turn.images and length > turn.shared_tokens:
            own = within(turn.images, 0, length - turn.shared_tokens)
            found = [*moved(own, turn.shared_tokens), *found]
        index, length = turn.parent, min(length, turn.shared_tokens)
    return tuple(found)


class LastPrompt:
    """The last prompt of a tree, to which the next one is appended if it extends it: the cost is
    that of the new tokens.

    The prompt lies in a buffer with room at its end. The buffer lives as long as anybody keeps a
    prompt in it, as the engines' routes keep each session's last one within their bounds.
    Invariant: a token in a buffer is written once, so a prompt that was returned never changes.
    """

    def __init__(self) -> None:
        self._buffer: weakref.ref[Ids] | None = None
        self._size = 0
        self._of: tuple[int | None, int, Ids] = (None, 0, EMPTY_IDS)
        """Parent, shared tokens and own tokens of the turn whose prompt ends at `_size`."""

    def extended(self, turns: Sequence[OwnTokens], index: int, new: Ids) -> Ids:
        """The whole path of turn `index` followed by `new`: as `prefix`, of `path_tokens`."""
        turn = turns[index]
        size = turn.path_tokens + len(new)
        if size < MIN_TOKENS:
            return prefix(turns, index, turn.path_tokens, new)
        buffer = None if self._buffer is None else self._buffer()
        parent, shared, own = self._of
        is_last = own is turn.prompt_ids and (turn.parent, turn.shared_tokens) == (parent, shared)
        if buffer is None or not is_last or size > len(buffer):
            buffer = np.empty(size + size // 4, np.int32)
            buffer[:size] = prefix(turns, index, turn.path_tokens, new)
            self._buffer = weakref.ref(buffer)
        else:
            buffer[self._size : size - len(new)] = turn.sampled_ids
            buffer[size - len(new) : size] = new
        self._size = size
        self._of = (index, turn.path_tokens, new)
        prompt = buffer[:size]
        prompt.flags.writeable = False
        return prompt


def common_prefix(left: Ids, right: Ids) -> int:
    """Length of the longest common prefix of two arrays."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:  # so the turns after a fork differ
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
