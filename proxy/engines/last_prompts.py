"""The last prompt of each session, and what was made of it.

Invariant: at most `limit_bytes` are kept, and nothing of a session after `forget`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import numpy as np

from proxy.records import Ids

LIMIT_BYTES = 128 * 2**20
MIN_TOKENS = 1024
"""A shorter prompt costs less than comparing it with the last one."""

T = TypeVar("T")


class LastPrompts(Generic[T]):
    """Its `len` is the size of what it keeps, in bytes."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._last: OrderedDict[str, tuple[Ids, T, int]] = OrderedDict()

    def __len__(self) -> int:
        return self._bytes

    def extended_by(self, ids: Ids, session_id: str) -> tuple[int, T] | None:
        """The length of the session's last prompt, and what was made of it, if `ids` begin with
        it."""
        if session_id not in self._last:
            return None
        before, made, _ = self._last[session_id]
        return (len(before), made) if _begins_with(ids, before) else None

    def keep(self, ids: Ids, session_id: str, made: T, made_bytes: int) -> None:
        self.forget(session_id)
        held = ids.base if isinstance(ids.base, np.ndarray) else ids
        size = held.nbytes + made_bytes
        self._last[session_id] = ids, made, size
        self._bytes += size
        while self._bytes > self._limit_bytes:
            self._bytes -= self._last.popitem(last=False)[1][2]

    def forget(self, session_id: str) -> None:
        """Frees the session's prompt, if one is kept."""
        if session_id in self._last:
            self._bytes -= self._last.pop(session_id)[2]


def _begins_with(ids: Ids, before: Ids) -> bool:
    """Prompts that lie at the start of one buffer (`proxy.token_tree.paths.LastPrompt`) need no
    comparison, because a token there is written once."""
    if len(before) > len(ids):
        return False
    same_buffer = isinstance(ids.base, np.ndarray) and ids.base is before.base
    if same_buffer and ids.ctypes.data == before.ctypes.data:
        return True
    return np.array_equal(ids[: len(before)], before)
