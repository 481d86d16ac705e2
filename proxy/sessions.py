"""The sessions of this process: who may call, and the token tree of each that is in use.

Invariant: a request reaches only the session whose key it carries (or, under `auto_create` on
loopback, the one that its path names). The store is the truth; what is kept here is a cache of at
most `sessions.cached` trees, and a session with a call in flight is never dropped from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import shortuuid

from proxy.config import SessionsConfig
from proxy.errors import HeldElsewhere, RequestError, SessionError, StoreError
from proxy.profiles import AgentProfile, Profiles
from proxy.records import Session, SessionKind, SessionStatus, Turn, TurnStatus
from proxy.store.protocol import Store
from proxy.token_tree import TokenTree

if TYPE_CHECKING:
    from proxy.live_call import LiveCall

MAX_ID_CHARS = 256
MAX_REFUSALS = 100
"""Recorded per session while it is in memory; the metrics count them all."""
CLOSING = ""
"""What wakes the listeners of a session that has ended; it is no event."""
_SEGMENT = re.compile(r"[A-Za-z0-9._~@:+=,-]+")
_RESERVED = frozenset(
    {".", "..", "v1", "sessions", "engines", "health", "ready", "metrics", "policy_version"}
    | {"rewards", "events", "trajectories", "complete", "openapi.json"}
)
"""Segments with a meaning of their own in our paths."""


@dataclass(slots=True)
class LiveSession:
    """A session with its tree in memory."""

    session: Session
    profile: AgentProfile
    tree: TokenTree = field(init=False)
    loaded_turns: int = field(init=False)
    """Turns below this index were read from the store: whether they arrived is not known here."""
    calls: dict[bytes, LiveCall] = field(default_factory=dict)
    """Running calls by their request's key: what a retry joins."""
    running: set[LiveCall] = field(default_factory=set)
    undelivered: dict[bytes, list[int]] = field(default_factory=dict)
    """Answered turns whose answer did not reach the agent, by request key."""
    replayed: set[int] = field(default_factory=set)
    """Recorded answers that were given again: not a second time."""
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn is placed and its intent recorded."""
    own: set[int] = field(default_factory=set)
    """Turns begun here whose calls run."""
    unsettled: frozenset[int] = frozenset()
    """Turns that were open elsewhere when the tree was read: it has not their answers."""
    unheld: frozenset[int] = frozenset()
    """Those among them whose process lets calls be served beside them: it is stopping."""
    in_flight: int = 0
    refusals: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: set[asyncio.Queue[dict[str, Any]]] = field(default_factory=set)

    def read(self, turns: Sequence[Turn]) -> None:
        """The tree anew, from what the store has."""
        self.tree = TokenTree(turns, follows=self.profile.follows)
        self.loaded_turns = len(turns)
        still_open = {turn.index for turn in turns if turn.status is TurnStatus.OPEN}
        self.unsettled = frozenset(still_open - self.own)

    def publish(self, kind: str, **data: Any) -> None:
        """Tells everybody who listens to the session; one who does not keep up loses events."""
        for queue in self.listeners:
            if not queue.full():
                queue.put_nowait({"kind": kind, "at": time.time(), **data})


class Sessions:
    def __init__(self, store: Store, config: SessionsConfig, profiles: Profiles) -> None:
        self._store = store
        self._profiles = profiles
        self._config = config
        self._live: OrderedDict[str, LiveSession] = OrderedDict()
        self._loading: dict[str, asyncio.Future[LiveSession]] = {}
        self._ids_by_key: OrderedDict[bytes, str] = OrderedDict()

    async def create(
        self,
        trial_id: str | None = None,
        *,
        kind: SessionKind = SessionKind.TRAIN,
        sampling: Mapping[str, Any] | None = None,
        profile: str = "default",
        limits: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
    ) -> tuple[Session, str]:
        """The session and its API key, which is told only here.

        Raises:
            RequestError: the id cannot be part of a path.
            SessionError: 409, the id exists.
        """
        self._profiles.get(profile)
        session_id = shortuuid.uuid() if trial_id is None else check_id(trial_id)
        key = f"sk-{secrets.token_urlsafe(32)}"
        now = time.time()
        session = Session(
            session_id=session_id,
            key_hash=key_hash(key),
            kind=kind,
            status=SessionStatus.OPEN,
            created_at=now,
            expires_at=now + (ttl_s or self._config.ttl_s),
            sampling=dict(sampling or {}),
            profile=profile,
            limits=dict(limits or {}),
            metadata=dict(metadata or {}),
        )
        if not await self._store.create_session(session):
            raise SessionError(f"session {session_id!r} exists already", status=409)
        return session, key

    async def authorise(self, key: str | None, trial_id: str | None) -> LiveSession:
        """The session that a data-plane call belongs to.

        Raises:
            SessionError: 401 for a missing, unknown or foreign key; 409 completed; 410 expired.
        """
        if trial_id is not None and self._config.auto_create:
            live = await self._find_or_create(check_id(trial_id))
        else:
            live = await self._by_key(key)
            if trial_id is not None and live.session.session_id != trial_id:
                raise _unauthorised()
        if live.session.status is SessionStatus.OPEN and time.time() >= live.session.expires_at:
            await self._expire(live)
        self._check_open(live.session)
        return live

    async def get(self, session_id: str) -> LiveSession:
        """Raises SessionError: 404 when unknown."""
        live = self._live.get(session_id)
        if live is not None:
            self._live.move_to_end(session_id)
            return live
        loading = self._loading.get(session_id)
        if loading is None:
            loading = asyncio.ensure_future(self._load(session_id))
            self._loading[session_id] = loading
            loading.add_done_callback(lambda _: self._loaded(session_id, loading))
        return await asyncio.shield(loading)

    def _loaded(self, session_id: str, loading: asyncio.Future[LiveSession]) -> None:
        if self._loading.get(session_id) is loading:
            del self._loading[session_id]

    async def reload(self, live: LiveSession) -> None:
        """Reads the tree again: another proxy wrote to the session, or our write failed."""
        stale = True
        while stale:
            turns = await self._store.get_turns(live.session.session_id)
            stale = any(turn.status is TurnStatus.OPEN and live.tree.knows(turn) for turn in turns)
        live.read(turns)

    async def hold(self, live: LiveSession) -> None:
        """Returns when no other process has calls of the session in flight, and the tree has what
        theirs were answered (`forwarding.py`). To be called while placing.

        Raises:
            HeldElsewhere: another has.
        """
        settled = False
        while not settled:
            known = live.unsettled
            address = await self._store.holder(live.session.session_id)
            if address is not None:
                raise HeldElsewhere(address)
            await self.reload(live)
            settled = live.unsettled <= known
        live.unheld = known

    def forget(self, live: LiveSession) -> None:
        """The tree may not be what the store has: the next call reads it again."""
        if self._live.get(live.session.session_id) is live:
            del self._live[live.session.session_id]

    async def complete(self, session_id: str) -> None:
        """Later calls get 409; calls in flight are cut."""
        live = await self.get(session_id)
        now = time.time()
        await self._store.set_status(session_id, SessionStatus.COMPLETED, now)
        live.session.status = SessionStatus.COMPLETED
        live.session.completed_at = now
        await self.record_event(live, "completed")
        self._close(live, "completed")

    async def delete(self, session_id: str) -> None:
        live = await self.get(session_id)
        await self._store.delete_session(session_id)
        live.session.status = SessionStatus.COMPLETED
        self._ids_by_key.pop(live.session.key_hash, None)
        live.publish("deleted")
        self._close(live, "deleted")
        self._live.pop(session_id, None)

    def ended_elsewhere(self, session_id: str, kind: str) -> None:
        """Another process of this proxy completed or deleted the session, and tells the listeners
        of it: ends its calls here."""
        live = self._live.pop(session_id, None)
        if live is not None:
            live.session.status = SessionStatus.COMPLETED
            self._ids_by_key.pop(live.session.key_hash, None)
            self._close(live, kind)

    async def record_event(self, live: LiveSession, kind: str, **data: Any) -> None:
        """Stored, and told to everybody who listens."""
        seq = await self._store.add_event(live.session.session_id, kind, data)
        live.publish(kind, seq=seq, **data)

    async def refused(self, live: LiveSession, **what: Any) -> None:
        """A call that was answered with an error is an event, at most MAX_REFUSALS per session."""
        live.refusals += 1
        if live.refusals <= MAX_REFUSALS:
            with contextlib.suppress(StoreError):
                await self.record_event(live, "refused", **what)

    async def _expire(self, live: LiveSession) -> None:
        now = time.time()
        await self._store.set_status(live.session.session_id, SessionStatus.EXPIRED, now)
        live.session.status = SessionStatus.EXPIRED
        await self.record_event(live, "expired")
        self._close(live, "expired")

    def _close(self, live: LiveSession, kind: str) -> None:
        live.closed.set()
        live.publish(CLOSING)
        for call in list(live.running):
            call.abort(_ended(live.session, kind))

    async def _find_or_create(self, session_id: str) -> LiveSession:
        try:
            return await self.get(session_id)
        except SessionError as error:
            if error.status != 404:
                raise
        try:
            await self.create(session_id, kind=SessionKind.EVAL)
        except SessionError as error:
            if error.status != 409:  # 409: another call of the same agent was faster
                raise
        self._loading.pop(session_id, None)  # it may have begun before the session was there
        return await self.get(session_id)

    async def _by_key(self, key: str | None) -> LiveSession:
        if not key:
            raise _unauthorised()
        digest = key_hash(key)
        session_id = self._ids_by_key.get(digest)
        if session_id is None:
            session = await self._store.find_by_key(digest)
            if session is None:
                raise _unauthorised()
            session_id = session.session_id
            self._ids_by_key[digest] = session_id
            while len(self._ids_by_key) > 4 * self._config.cached:
                self._ids_by_key.popitem(last=False)
        live = await self.get(session_id)
        if not hmac.compare_digest(live.session.key_hash, digest):
            raise _unauthorised()
        return live

    def _check_open(self, session: Session) -> None:
        if session.status is SessionStatus.COMPLETED:
            raise _ended(session, "completed")
        if session.status is SessionStatus.EXPIRED:
            raise SessionError(f"session {session.session_id!r} has expired", status=410)

    async def _load(self, session_id: str) -> LiveSession:
        session = await self._store.get_session(session_id)
        if session is None:
            raise SessionError(f"session {session_id!r} is unknown", status=404)
        turns = await self._store.get_turns(session_id)
        if session_id in self._live:  # read twice at a time: there is one tree
            return self._live[session_id]
        live = LiveSession(session, self._profiles.get(session.profile))
        live.read(turns)
        if session.status is not SessionStatus.OPEN:
            live.closed.set()
        self._live[session_id] = live
        self._evict()
        return live

    def _evict(self) -> None:
        excess = len(self._live) - self._config.cached
        if excess > 0:
            all_idle = (i for i, s in self._live.items() if not s.in_flight and not s.listeners)
            for session_id in list(itertools.islice(all_idle, excess)):
                del self._live[session_id]


def check_id(session_id: str) -> str:
    """Raises RequestError when the id cannot stand in a path without being mistaken."""
    segments = session_id.split("/")
    wrong = [s for s in segments if not _SEGMENT.fullmatch(s) or s.lower() in _RESERVED]
    if len(session_id) > MAX_ID_CHARS or wrong:
        raise RequestError(
            f"trial_id: {session_id[:MAX_ID_CHARS]!r}: at most {MAX_ID_CHARS} characters of "
            "A-Z a-z 0-9 . _ ~ @ : + = , - and / between names, none of them reserved",
            param="trial_id",
        )
    return session_id


def key_hash(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()


def _ended(session: Session, kind: str) -> SessionError:
    return SessionError(f"session {session.session_id!r} is {kind}", status=409)


def _unauthorised() -> SessionError:
    return SessionError("this API key belongs to no session here", status=401)
