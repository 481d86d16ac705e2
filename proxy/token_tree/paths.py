"""Assembles a turn's path from the tokens that each turn on it added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from proxy.records import EMPTY_IDS, Ids


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


def common_prefix(left: Ids, right: Ids) -> int:
    """Length of the longest common prefix of two arrays."""
    size = min(len(left), len(right))
    if size == 0 or left[0] != right[0]:  # so the turns after a fork differ
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
