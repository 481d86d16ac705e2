"""Serialises prompts as JSON. A prompt that extends its session's last one costs only the new ids.

Invariant: the result of `dump` does not depend on the cache, which holds at most `limit_bytes`, and
nothing of a session after `forget`.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import orjson

from proxy.records import Ids

LIMIT_BYTES = 128 * 2**20
MIN_TOKENS = 1024
"""Serialising a shorter prompt is faster than comparing it with the cached one."""


class PromptJson:
    """Writes prompts as JSON, and keeps the last prompt of each session in both forms. Its `len` is
    the size of what it keeps, in bytes."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._last: OrderedDict[str, tuple[Ids, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return self._bytes

    def dump(self, ids: Ids, session_id: str) -> bytes:
        """The ids, `[T]`, as a JSON list."""
        if len(ids) < MIN_TOKENS:
            return _dump(ids)
        before, text = self._last.get(session_id, (ids[:0], b"[]"))
        known = len(before)
        if known == 0 or known > len(ids) or not np.array_equal(ids[:known], before):
            text = _dump(ids)
        elif known < len(ids):
            text = b"%b,%b" % (text[:-1], _dump(ids[known:])[1:])
        self._keep(session_id, ids, text)
        return text

    def forget(self, session_id: str) -> None:
        """Frees the session's prompt, if one is kept."""
        self._subtract(self._last.pop(session_id, None))

    def _keep(self, session_id: str, ids: Ids, text: bytes) -> None:
        self.forget(session_id)
        self._last[session_id] = (ids, text)
        self._bytes += ids.nbytes + len(text)
        while self._bytes > self._limit_bytes:
            self._subtract(self._last.popitem(last=False)[1])

    def _subtract(self, entry: tuple[Ids, bytes] | None) -> None:
        if entry is not None:
            self._bytes -= entry[0].nbytes + len(entry[1])


def _dump(ids: Ids) -> bytes:
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)
