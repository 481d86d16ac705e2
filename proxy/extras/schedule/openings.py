"""How many tokens a session's prompts share with those of other sessions.

Agents of one kind have the same system prompt and tools, and trials of one task the same task. An
engine keeps such a prefix once, so it is counted for the session that came with it first.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from proxy.records import Ids

COMPARED = 16
"""Number of different openings that are remembered."""
MAX_TOKENS = 65_536
"""A longer opening is compared up to here."""
REMEMBERED_SESSIONS = 100_000
"""With more sessions, the one that came first is forgotten, and counted as if it shared nothing."""


class Openings:
    """The first prompts of recent sessions."""

    def __init__(self) -> None:
        self._recent: deque[Ids] = deque(maxlen=COMPARED)
        self._shared: OrderedDict[str, int] = OrderedDict()

    def arrive(self, session_id: str, prompt: Ids) -> None:
        """A call of the session arrives. Only its first one is compared with other sessions'."""
        if session_id in self._shared:
            return
        opening = prompt[:MAX_TOKENS]
        shared = max((_common(opening, other) for other in self._recent), default=0)
        self._shared[session_id] = shared
        if shared * 2 < len(opening):
            self._recent.append(opening.copy())
        if len(self._shared) > REMEMBERED_SESSIONS:
            self._shared.popitem(last=False)

    def own(self, session_id: str, path_tokens: int) -> int:
        """The number of tokens of a path of the session that only this session needs."""
        return max(0, path_tokens - self._shared.get(session_id, 0))

    def forget(self, session_id: str) -> None:
        self._shared.pop(session_id, None)


def _common(one: Ids, other: Ids) -> int:
    """The length of the common prefix."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
