"""`AgentRunError`: the one error of the SDK. Its `code` says what happened, `retryable` what to do.

Codes: `unreachable`, `unauthorized`, `not_found`, `invalid`, `conflict`, `too_large`,
`queue_full`, `timeout` (the caller's wait ended; the run goes on), `protocol`, `server`.
"""

from __future__ import annotations


class AgentRunError(Exception):
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
        """The HTTP status; 0 where there was no answer."""
        self.retryable = retryable
        self.retry_after_s = retry_after_s
