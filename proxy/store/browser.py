"""Reads a store for people: pages of sessions and turns, what happened last, and who may look.

Invariant: each query follows an index and returns a bounded number of rows, whatever the size of
the store. None of them reads token ids, except `turns`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from proxy.records import (
    FinishReason,
    ForkCause,
    Mark,
    RecordedImage,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Selects sessions, the newest first. Example: SessionPage(status=SessionStatus.OPEN)"""

    status: SessionStatus | None = None
    kind: SessionKind | None = None
    id_prefix: str = ""
    marked: str | None = None
    """As in `SessionFilter`."""
    before: tuple[float, str] | None = None
    """`created_at` and id of the last session of the previous page."""
    limit: int = 50


@dataclass(slots=True)
class SessionSummary:
    """A session with numbers about its turns."""

    session: Session
    turns: int = 0
    running: int = 0
    """Number of turns without an answer. After a crash it counts those that were cut."""
    cut: int = 0
    sampled_tokens: int = 0
    longest_path: int = 0
    """Number of tokens of the longest path."""
    last_at: float | None = None
    """When the last turn began or ended, in Unix seconds."""
    forks: dict[str, int] = field(default_factory=dict)
    """Number of forks by cause."""


@dataclass(frozen=True, slots=True)
class TurnHead:
    """A turn without its tokens and texts."""

    session_id: str
    index: int
    parent: int | None
    shared_tokens: int
    fork_cause: ForkCause | None
    dialect: str
    agent_id: str | None
    started_at: float
    new_tokens: int
    """Number of prompt tokens after the shared ones."""
    after: int | None
    """The turn whose answer is the last recorded one in the request's conversation."""
    same_as: int | None
    """The turn whose request this one repeats."""
    status: TurnStatus
    finish_reason: FinishReason | None
    versions: tuple[VersionSpan, ...]
    first_token_s: float | None
    duration_s: float | None
    sampled_tokens: int
    engine: str
    """See `Turn.engine`."""


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A turn with the text that it added to its conversation, without its tokens."""

    place: int
    """Its place in the order in which the store's turns began."""
    session_id: str
    index: int
    fork_cause: ForkCause | None
    agent_id: str | None
    started_at: float
    request: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has followed the store. Example: Position.parse("17.16.3")"""

    begun: int = 0
    answered: int = 0
    events: int = 0

    def __str__(self) -> str:
        return f"{self.begun}.{self.answered}.{self.events}"

    @staticmethod
    def parse(text: str) -> Position | None:
        """None for text of another form."""
        found = re.fullmatch(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})", text)
        return None if found is None else Position(*(int(number) for number in found.groups()))


@dataclass(frozen=True, slots=True)
class Recent:
    """What happened in a store after a position."""

    position: Position
    begun: list[TurnHead]
    answered: list[TurnHead]
    events: list[dict[str, Any]]
    """Each as `{session_id, seq, at, kind, …}`."""


class GrantKind(StrEnum):
    """What a secret for the page is."""

    LINK = "link"
    """Opens the page once."""
    KEY = "key"
    """Opens the page until it is revoked."""
    COOKIE = "cookie"
    """One browser's, from a link or a key with the same name."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A permission to read the page."""

    digest: bytes
    """SHA-256 of the secret, which is not stored."""
    kind: GrantKind
    name: str
    created_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class SavedRule:
    """A search rule that was saved from the page."""

    name: str
    query: bytes
    """JSON, as `proxy/extras/rules/rules.py` writes it."""
    created_at: float


class Browser(Protocol):
    """Every method raises StoreError when the store fails."""

    async def add_mark(self, session_id: str, mark: Mark) -> bool:
        """Returns False if the session has a mark of this rule, which is kept, or does not
        exist."""
        ...

    async def marks(self, session_ids: Sequence[str]) -> dict[str, list[Mark]]:
        """The marks of those of the sessions that have any."""
        ...

    async def saved_rules(self) -> list[SavedRule]: ...

    async def save_rule(self, rule: SavedRule) -> bool:
        """Returns False if there is a rule of this name, which is kept."""
        ...

    async def remove_rule(self, name: str) -> bool:
        """Returns False if there is no rule of this name. Marks are kept."""
        ...

    async def sessions(self, page: SessionPage) -> list[SessionSummary]: ...

    async def session(self, session_id: str) -> SessionSummary | None: ...

    async def created_at(self, session_id: str) -> float | None:
        """By which a session is told from an earlier one of its id, which was deleted."""
        ...

    async def heads(self, session_id: str, since: int, limit: int) -> list[TurnHead]:
        """Turns with an index of at least `since`, in order."""
        ...

    async def turns(self, session_id: str, indexes: Sequence[int]) -> list[Turn]:
        """Those of the turns that exist, in order. A turn that a dead proxy left is OPEN."""
        ...

    async def image(self, session_id: str, sha256: str) -> RecordedImage | None:
        """An image of one of the session's turns. Raises StoreError: its bytes are not those that
        were recorded."""
        ...

    async def requests(self, session_id: str, first: int, until: int) -> list[bytes]:
        """What turns with an index of at least `first` and below `until` have recorded of their
        requests, in order, as `Turn.request`."""
        ...

    async def last_events(self, session_ids: Sequence[str], kind: str) -> dict[str, dict[str, Any]]:
        """The data of the last event of this kind of those of the sessions that have one."""
        ...

    async def forks(self, cause: ForkCause, before: float, limit: int) -> list[TurnHead]:
        """Forks that began before the Unix time `before`, the newest first."""
        ...

    async def written(self, before: int, limit: int, max_bytes: int) -> list[WrittenTurn]:
        """At most `limit` turns that began before a place in the store's order, the newest first:
        as many as have `max_bytes` of text together, but at least one."""
        ...

    async def begun(self, after: int, limit: int) -> list[tuple[int, TurnHead]]:
        """At most `limit` turns that began after a place in the store's order, each with its
        place, in this order."""
        ...

    async def recent(self, after: Position | None, limit: int) -> Recent:
        """At most `limit` turns that began, turns that ended, and events after a position; without
        one, the last ones of the store."""
        ...

    async def add_grant(self, grant: Grant) -> None: ...

    async def find_grant(self, digest: bytes) -> Grant | None: ...

    async def take_grant(self, digest: bytes) -> Grant | None:
        """Removes a grant. Of several callers, one gets it."""
        ...

    async def grants(self, kind: GrantKind) -> list[Grant]: ...

    async def revoke_grants(self, name: str) -> int:
        """Removes all grants of this name. Returns their number."""
        ...
