"""The proxy's errors: one type per boundary, each with the HTTP status that the caller gets.

ProxyError
├── RequestError        the agent's request cannot be answered            400 / 413 / 429
│   ├── ContextOverflow the prompt does not fit the model's context       400
│   ├── Diverged        a branch's request is not the recorded one        403
│   └── EngineRefusal   the engine refuses the call's parameters          400
├── SessionError        unknown key 401, unknown id 404, completed 409, expired 410
├── HeldElsewhere       another process serves the session now            421 / 503
├── EngineError         no replica could answer                           503 (retryable) / 502
│   ├── MissingAdapter  the replica lacks the adapter that the call names 502
│   └── UnreachableEngine  no connection, so the call did not reach the replica 503
├── ImageError          a prompt's images are not those of its record     500
├── StoreError          the store failed, so the call is not answered     503
└── ConfigurationError  the process cannot start: key, value, bound and what to do
"""

from __future__ import annotations


class ProxyError(Exception):
    """`status` is the HTTP status; `retry_after_s` is sent as `Retry-After` if it is set."""

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
    """The message gives the field, its value and its bound. `param` is the field's name."""

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


class QuotaReached(RequestError):
    """A quota of several sessions allows no further call (docs/operations.md)."""

    def __init__(self, quota: str) -> None:
        super().__init__(f"the quota {quota!r} is used up or was removed", status=403, code="quota")


class ContextOverflow(RequestError):
    """Each dialect has its own wording, on which its agents compact their history."""

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"prompt is {prompt_tokens} tokens, the model's context is {max_tokens}",
            code="context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class Diverged(RequestError):
    """A strict branch got a request that is not the recorded one, and refuses all further ones.
    SDKs do not repeat a call that gets 403."""

    status = 403

    def __init__(self, message: str) -> None:
        super().__init__(message, code="diverged", param="messages")


class EngineRefusal(RequestError):
    """The engine's own message, which is logged and not sent to agents (`router.py`)."""


class SessionError(ProxyError):
    """The key or the state of the session does not allow the request; 401 by default."""

    status = 401


class HeldElsewhere(ProxyError):
    """421: another process serves the session, and the call must go there."""

    status = 421

    def __init__(self, address: str) -> None:
        super().__init__(f"the proxy at {address} serves this session's calls")
        self.address = address

    def unreachable(self) -> ProxyError:
        return ProxyError(
            f"{self.message} and does not answer; try again. If this persists, check the peer_url "
            "of that proxy, by which proxies on one store reach each other",
            status=503,
            retry_after_s=1.0,
        )


class EngineError(ProxyError):
    """503: another replica or a later attempt may succeed. 502: the engine's answer is unusable.

    What an engine's client raises names the engine's address. `proxy/routing/router.py` logs it
    under an id, and agents get an error that names only the id.
    """

    status = 503
    retry_after_s = 1.0


class MissingAdapter(EngineError):
    """The replica does not have the adapter that the call names, as after its restart. It has not
    failed: it answers other calls."""

    status = 502


class UnreachableEngine(EngineError):
    """There is no connection to the replica, so it did not get the call."""


class ImageError(ProxyError):
    """The image tokens of a prompt are not those of its recorded images. Nothing is sampled or
    trained, because the model would see another image, or none."""


class StoreError(ProxyError):
    """503: the store cannot read or write now; the request can be retried."""

    status = 503
    retry_after_s = 1.0


class ConfigurationError(ProxyError):
    """The configuration is invalid, or this installation cannot satisfy it."""
