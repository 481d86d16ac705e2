"""`AgentRunError`, the only error of the SDK. Its `code` says what happened.

Codes: `unreachable`, `unauthorized`, `forbidden`, `not_found`, `invalid`, `conflict`, `too_large`,
`queue_full`, `timeout` (the caller's time limit has passed; the run continues), `protocol`,
`server`.
"""

from __future__ import annotations


class AgentRunError(Exception):
    """A request failed, or a run cannot be made.

    `retryable` says whether the same call may succeed later, after `retry_after_s` if it is given.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 0,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        """The HTTP status; 0 if there was no answer."""
        self.retryable = retryable
        self.retry_after_s = retry_after_s
