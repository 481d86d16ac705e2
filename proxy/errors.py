"""The proxy's errors: one type per boundary, each with what the caller is told.

ProxyError
├── RequestError        the agent's request cannot be honoured            400 / 413 / 429
│   └── ContextOverflow the prompt does not fit the model's context       400
├── SessionError        unknown key 401, unknown id 404, completed 409, expired 410
├── HeldElsewhere       another process serves the session now            421 / 503
├── EngineError         no replica could answer                           503 (retryable) / 502
├── StoreError          it could not be recorded, so it is not answered   503
└── ConfigurationError  the process cannot start: names key, value, bound and what to do
"""

from __future__ import annotations


class ProxyError(Exception):
    """`status` is the HTTP status; `retry_after_s` is sent as `Retry-After` where it is set."""

    status = 500
    retry_after_s: float | None = None

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class RequestError(ProxyError):
    """The message names the field, its value and its bound. `param` is the dialect's field name."""

    status = 400

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, retry_after_s=retry_after_s)
        self.param = param
        self.code = code


class ContextOverflow(RequestError):
    """Each dialect words this so that its agents compact."""

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"prompt is {prompt_tokens} tokens, the model's context is {max_tokens}",
            code="context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class SessionError(ProxyError):
    status = 401


class HeldElsewhere(ProxyError):
    """421: another process is to be asked. 503: it does not answer."""

    status = 421

    def __init__(self, address: str) -> None:
        super().__init__(f"the proxy at {address} serves this session's calls")
        self.address = address

    def unreachable(self) -> ProxyError:
        return ProxyError(
            f"{self.message} and does not answer; try again (peer_url is what proxies on one store "
            "reach each other by)",
            status=503,
            retry_after_s=1.0,
        )


class EngineError(ProxyError):
    """503: another replica, or a later try, may do better. 502: the engine answered nonsense."""

    status = 503
    retry_after_s = 1.0
    started = False
    """Whether a sampled token was given out before: then no other replica may answer the call."""


class StoreError(ProxyError):
    status = 503
    retry_after_s = 1.0


class ConfigurationError(ProxyError):
    pass
