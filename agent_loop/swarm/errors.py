"""`SwarmError`: what a swarm server refuses, or that it cannot be reached. `code` says which.

Codes: `unreachable`, `unauthorized`, `not_found`, `not_yours`, `invalid`, `state` (not in this
engine state), `late` (the episode was reclaimed), `conflict` (ended before, differently),
`throttled`, `unavailable` (ask again), `protocol` (no swarm server answered).
"""

from __future__ import annotations

STATUS = {
    "unauthorized": 401,
    "not_found": 404,
    "not_yours": 403,
    "invalid": 400,
    "state": 409,
    "late": 410,
    "conflict": 409,
    "throttled": 429,
    "unavailable": 503,
}


class SwarmError(Exception):
    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 500)

    @property
    def retryable(self) -> bool:
        return self.code in ("unreachable", "unavailable")
