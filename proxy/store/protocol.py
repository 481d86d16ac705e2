"""The protocol of a store. The store is the source of truth; memory is a bounded cache of it.

Invariant: `begin_turn` returns once the intent is durable, and sampling starts only then.
`commit_turn` returns once the turn is durable, and the terminal event is sent only then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from proxy.records import (
    Quota,
    RecordedImage,
    Reward,
    ServedPolicy,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
)
from proxy.store.browser import Browser

Durability = Literal["process", "power"]
"""What a recorded turn survives: `process`: `kill -9` of the proxy; `power`: also a power failure
of the machine (each write then waits for the disk)."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Selects the sessions that `list_sessions` returns, in order of their ids."""

    status: SessionStatus | None = None
    kind: SessionKind | None = None
    id_prefix: str = ""
    after: str | None = None
    """The last session id of the previous page; None for the first page."""
    limit: int = 100
    marked: str | None = None
    """Only sessions that match this search rule; `*` for any rule."""


class DeliveryMark(msgspec.Struct, frozen=True):
    """Whether the answer of a turn arrived at its agent."""

    session_id: str
    index: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Answered turns of a session that are not known to have reached the agent."""

    lost: frozenset[int] = frozenset()
    """The connection broke, or the process ended before it recorded that the answer arrived."""
    pending: frozenset[int] = frozenset()
    """Another living process may still be sending the answer."""
    replayed: frozenset[int] = frozenset()
    """In a branch: the recorded turns whose answers have reached its agent. They are the only
    ones of these that are known."""


class Store(Protocol):
    """Every method raises StoreError when the store fails (disk full, file locked, server gone)."""

    @property
    def browser(self) -> Browser:
        """Reads the store for people."""
        ...

    async def create_session(self, session: Session) -> bool:
        """Returns False and changes nothing if the id already exists.

        Raises SessionError for a branch: 404, the session of its origin does not exist; 409, it is
        to be salvaged, and has been already.
        """
        ...

    async def get_session(self, session_id: str) -> Session | None: ...

    async def find_by_key(self, key_hash: bytes) -> Session | None: ...

    async def list_sessions(self, where: SessionFilter) -> list[Session]: ...

    async def set_status(self, session_id: str, status: SessionStatus, at: float) -> bool: ...

    async def delete_session(self, session_id: str) -> bool:
        """Raises SessionError (409) if a branch refers to the session."""
        ...

    async def remove_ended(self, before: float, limit: int) -> int:
        """Removes up to `limit` sessions that were completed or expired before the Unix time
        `before`, with all their data, unless a branch refers to them. Returns the number of
        removed sessions.

        A SQLite file then shrinks; in PostgreSQL, autovacuum makes the space reusable.
        """
        ...

    async def used_bytes(self) -> int | None:
        """Size of the data, without the space that removed data has left; None: not known."""
        ...

    async def begin_turn(self, turn: Turn, quota: str = "") -> None:
        """Records the intent: everything known before sampling. An index is unique in a session.
        The turn is counted in `quota`, if one is given, in the same transaction.

        Raises:
            QuotaReached: the quota's turns or tokens are used up, or there is no such quota.
            TurnConflict: another writer has begun a turn with this index.
            SessionError: in the store the session is completed (409), expired (410), or missing
                (404), whatever the proxy's cache holds.
        """
        ...

    async def add_images(self, session_id: str, images: Sequence[RecordedImage]) -> None:
        """Records images that a turn of the session is going to have, each once for all sessions.
        They are removed with the last session that has them.

        Raises SessionError (404) for a session that does not exist.
        """
        ...

    async def get_image(self, sha256: str) -> RecordedImage | None: ...

    async def commit_turn(self, turn: Turn, quota: str = "") -> None:
        """Records the answer: sampled ids, log-probabilities, versions, status, keys and times.
        Its tokens are counted in `quota`, in the same transaction. A turn that ended before its
        first token no longer counts there.

        Raises SessionError (404) when the session has been deleted since `begin_turn`, and
        StoreError for an answer that is DONE if another process has closed the turn as CUT: the
        store considered this process dead, as when PostgreSQL was restarted.
        """
        ...

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None: ...

    async def cut_own_turn(self, session_id: str, index: int, quota: str = "") -> bool:
        """Marks a turn as CUT if this process began it and its answer is not recorded. It does not
        count in `quota` any more, if one is given.

        Returns False if there is no such turn.
        """
        ...

    async def mark_deliveries(self, marks: Sequence[DeliveryMark]) -> None:
        """Records whether answers arrived; a later mark replaces an earlier one. Marks of sessions
        that were deleted are ignored."""
        ...

    async def undelivered(self, session_id: str) -> Undelivered:
        """The turns that are DONE and not marked as arrived, except those of this process that have
        no mark yet; and the replayed turns of a branch."""
        ...

    async def get_turns(
        self, session_id: str, since: int = 0, until: int | None = None
    ) -> list[Turn]:
        """Turns with an index of at least `since` and below `until`, in order. The first ones of a
        branch are those of its origin; a DONE turn that another session trains is CONTEXT.

        A turn that a dead proxy process left OPEN is marked CUT in the result and in the store.
        """
        ...

    async def announce(self, address: str | None) -> None:
        """Publishes the address at which other processes on this store can reach this one; None
        withdraws the address."""
        ...

    async def others(self) -> list[str]:
        """The addresses of the other living processes on this store that do not share its port.
        Those of a SQLite store do (`several_processes/siblings.py`), so that it has none."""
        ...

    async def serving(self) -> list[str]:
        """The addresses that other living processes on this store have announced, also those that
        share a port."""
        ...

    async def holder(self, session_id: str) -> str | None:
        """The address of another living process that holds the session, that is, has a turn in it
        that is open, or answered and not marked as delivered or lost (see
        `proxy/serving/ownership.py`). None if there is none, or if it published no address."""
        ...

    async def add_reward(self, session_id: str, reward: Reward) -> bool:
        """Returns False if the session already has a reward with this key, which is kept. Raises
        SessionError: 404, there is no session."""
        ...

    async def set_reward(self, session_id: str, reward: Reward) -> None:
        """Adds a reward, or replaces the one with its key: a person's rating, which may change.
        Raises SessionError: 404, there is no session."""
        ...

    async def replace_metadata(
        self, session_id: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> bool:
        """Returns False, and changes nothing, if the session's metadata are not `before`."""
        ...

    async def add_event(self, session_id: str, kind: str, data: dict[str, Any]) -> int:
        """Returns its `seq`. Raises SessionError: 404, there is no session."""
        ...

    async def get_events(self, session_id: str, since: int = 0) -> list[dict[str, Any]]:
        """The events with `seq > since` in order, each as `{seq, at, kind, …}`."""
        ...

    async def publish_policy(self, served: ServedPolicy) -> bool:
        """Records the current version of the policy instead of the one before. Returns False, and
        changes nothing, if the policy belongs to another run."""
        ...

    async def release_policy(self, name: str, run: str) -> None:
        """Makes the policy belong to no run, if it belongs to this one."""
        ...

    def policy_changes(self) -> AsyncGenerator[None]:
        """Yields once it would notice each further change, and after each change that another
        process has made to the policies. Ends after the first if no other proxy uses the store.

        Raises:
            StoreError: the store can no longer be watched.
        """
        ...

    async def get_policies(self) -> list[ServedPolicy]:
        """The current version of each policy."""
        ...

    async def set_quota(
        self, name: str, *, max_turns: int | None, max_tokens: int | None, reset: bool
    ) -> Quota:
        """Creates the quota or changes its maxima; with `reset`, counting begins again at 0."""
        ...

    async def remove_quota(self, name: str) -> bool:
        """Removes the quota, and returns whether it existed. No call in it begins any more."""
        ...

    async def get_quotas(self) -> list[Quota]:
        """All quotas in order of their names."""
        ...

    async def close(self) -> None:
        """Waits for the writes in progress. A second call does nothing."""
        ...


class OpenStore(Protocol):
    """The type of the openers in the registry of stores: opens the store at `url`.

    Raises ConfigurationError, also if there is no store yet and `create` is False.
    """

    async def __call__(self, url: str, *, durability: Durability, create: bool) -> Store: ...


class TurnConflict(Exception):
    """Another writer has begun a turn with this index; read its turns and place the call again."""
