"""Serialises prompts as JSON. A prompt that extends its session's last one costs only the new ids.

Invariant: the result of `dump` does not depend on what is kept.
"""

from __future__ import annotations

import numpy as np
import orjson

from proxy.engines.last_prompts import LIMIT_BYTES, MIN_TOKENS, LastPrompts
from proxy.records import Ids


class PromptJson:
    """Writes prompts as JSON, and keeps the last prompt of each session in both forms. Its `len` is
    the size of what it keeps, in bytes."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._last = LastPrompts[bytes](limit_bytes)

    def __len__(self) -> int:
        return len(self._last)

    def dump(self, ids: Ids, session_id: str) -> bytes:
        """The ids, `[T]`, as a JSON list."""
        if len(ids) < MIN_TOKENS:
            return _dump(ids)
        known, text = self._last.extended_by(ids, session_id) or (0, b"")
        if known == 0:
            text = _dump(ids)
        elif known < len(ids):
            text = b"%b,%b" % (text[:-1], _dump(ids[known:])[1:])
        self._last.keep(ids, session_id, text, len(text))
        return text

    def forget(self, session_id: str) -> None:
        """Frees the session's prompt, if one is kept."""
        self._last.forget(session_id)


def _dump(ids: Ids) -> bytes:
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)
