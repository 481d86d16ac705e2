"""What a store keeps, and when. The store is the truth; memory is a bounded cache over it.

Invariant: `begin_turn` returns once the intent is durable, and only then is anything sampled;
`commit_turn` returns once the turn is durable, and only then is the terminal event sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from proxy.records import Reward, Session, SessionKind, SessionStatus, Turn, TurnStatus


@dataclass(frozen=True, slots=True)
class SessionFilter:
    status: SessionStatus | None = None
    kind: SessionKind | None = None
    id_prefix: str = ""
    after: str | None = None
    """Listing continues behind this session id."""
    limit: int = 100


class Store(Protocol):
    """Every method raises StoreError when it could not be recorded (disk full, locked, gone)."""

    async def create_session(self, session: Session) -> bool:
        """False when the id exists already; nothing is changed then."""
        ...

    async def get_session(self, session_id: str) -> Session | None: ...

    async def find_by_key(self, key_hash: bytes) -> Session | None: ...

    async def list_sessions(self, where: SessionFilter) -> list[Session]: ...

    async def set_status(self, session_id: str, status: SessionStatus, at: float) -> bool: ...

    async def delete_session(self, session_id: str) -> bool: ...

    async def begin_turn(self, turn: Turn) -> None:
        """Intent: everything known before sampling. The index is unique within the session.

        Raises:
            TurnConflict: another writer has begun a turn of this index.
            SessionError: the session is completed (409), expired (410) or unknown (404), as the
                store knows it, whatever a proxy's cache still believes.
        """
        ...

    async def commit_turn(self, turn: Turn) -> None:
        """The answer: sampled ids, log-probabilities, versions, status, keys, answer, times.

        Raises SessionError (404) when the session was deleted meanwhile.
        """
        ...

    async def set_turn_status(self, session_id: str, index: int, status: TurnStatus) -> None: ...

    async def get_turns(self, session_id: str, since: int = 0) -> list[Turn]:
        """In order of index, from `since`.

        A turn that was left OPEN by a proxy process that has died is CUT, here and in the store.
        """
        ...

    async def announce(self, address: str | None) -> None:
        """Where other processes on this store reach this one; None: it takes no calls of theirs."""
        ...

    async def holder(self, session_id: str) -> str | None:
        """The address of another living process that has an open turn in the session, and so serves
        it (`proxy/processes/forwarding.py`); None: there is none, or it has no address."""
        ...

    async def add_reward(self, session_id: str, reward: Reward) -> bool:
        """False when the key was used already: the first value stands."""
        ...

    async def add_event(self, session_id: str, kind: str, data: dict[str, Any]) -> int: ...

    async def get_events(self, session_id: str, since: int = 0) -> list[dict[str, Any]]:
        """Each `{seq, at, kind, …}` with `seq > since`."""
        ...

    async def close(self) -> None: ...


class TurnConflict(Exception):
    """Another writer has begun a turn of this index: read its turns and place the call anew."""
