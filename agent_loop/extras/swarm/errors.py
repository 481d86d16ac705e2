"""`SwarmError`: a swarm server refused a request, or cannot be reached.

Codes: `unreachable`, `unauthorized`, `not_found`, `not_yours`, `invalid`, `state` (not possible in
the engine's state), `late` (the episode was reclaimed), `conflict` (it already ended differently),
`throttled`, `unavailable` (repeat the request later), `protocol` (the answer is not a swarm
server's).
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
    """Example: SwarmError("no episode 'e-1'", "not_found").status == 404"""

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
