"""How long sessions are away at their tools between two calls.

Most tools answer within seconds and a few take minutes. A session that has been away for longer
than most is unlikely to come back soon, so its place in a cache is better given to another one.
"""

from __future__ import annotations

from collections import deque

KEPT = 512
"""Number of recent times that are remembered: enough for a quantile, and it follows a change."""
UPDATED_EVERY = 16
"""Number of new times after which the quantile is computed again."""
FIRST_S = 30.0
"""The estimate before `UPDATED_EVERY` times are known."""


class AwayTimes:
    """Recent times between the end of a session's call and its next one."""

    def __init__(self, share: float = 0.95) -> None:
        """`share` is the share of the times that `usual_s` covers."""
        self._share = share
        self._times_s: deque[float] = deque(maxlen=KEPT)
        self._new = 0
        self.usual_s = FIRST_S
        """The time within which the given share of sessions came back."""

    def add(self, away_s: float) -> None:
        self._times_s.append(away_s)
        self._new += 1
        if self._new >= UPDATED_EVERY:
            self._new = 0
            times_s = sorted(self._times_s)
            self.usual_s = times_s[min(int(len(times_s) * self._share), len(times_s) - 1)]
