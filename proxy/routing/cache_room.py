"""Which calls may go to the engines now: the protocol of what decides it, and its default.

The extra `scheduling` implements it where the engines' KV caches are too small for all sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.records import Ids


@dataclass(frozen=True, slots=True)
class RoomClaim:
    """What a decision needs to know about a call.

    Example: RoomClaim("t-1#7", "t-1", prompt_tokens=12_000, max_tokens=4096)
    """

    call_id: str
    session_id: str
    prompt_tokens: int
    """0 for a further sample of a prompt that is sampled already."""
    max_tokens: int
    group: str = ""
    max_wait_s: float | None = None
    """How long the caller can wait, if that is known."""
    prompt: Ids | None = None
    """The prompt, which shows what it shares with other sessions' prompts; None: nothing."""


class CacheRoom(Protocol):
    """Lets calls wait until the caches have room for them."""

    @property
    def active(self) -> bool:
        """Whether any call may have to wait."""
        ...

    @property
    def waiting(self) -> int:
        """Number of calls that wait."""
        ...

    def report(self, replica: str, cache_tokens: int | None) -> None:
        """The replica is healthy, and its KV cache holds this many tokens, if that is known."""
        ...

    def failed(self, replica: str) -> None:
        """The replica failed."""
        ...

    def lost(self, replica: str) -> None:
        """The replica was removed."""
        ...

    def knows(self, replica: str) -> bool:
        """Whether the replica has reported its cache, even if it is down now."""
        ...

    async def admitted(self, claim: RoomClaim, usable: Callable[[], list[str]]) -> str | None:
        """Returns when the call may go to an engine: to this replica, or to any (None). `usable`
        returns the names of the healthy replicas that can serve it; if none is healthy, those
        whose caches are known (`knows`), for which it waits."""
        ...

    def ended(self, session_id: str, call_id: str, path_tokens: int, answer_tokens: int) -> None:
        """The call has ended, with these numbers of tokens."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...

    def close(self) -> None: ...


class AlwaysRoom:
    """Implements `CacheRoom`: no call waits."""

    active = False
    waiting = 0

    def report(self, replica: str, cache_tokens: int | None) -> None:
        """Does nothing."""

    def failed(self, replica: str) -> None:
        """Does nothing."""

    def lost(self, replica: str) -> None:
        """Does nothing."""

    def knows(self, replica: str) -> bool:
        return False

    async def admitted(self, claim: RoomClaim, usable: Callable[[], list[str]]) -> str | None:
        return None

    def ended(self, session_id: str, call_id: str, path_tokens: int, answer_tokens: int) -> None:
        """Does nothing."""

    def forget(self, session_id: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
