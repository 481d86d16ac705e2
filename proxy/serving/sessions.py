"""The sessions of this process: authorisation, and the token trees in memory.

Invariant: a request gets access only to the session whose key it carries (or, with `auto_create` on
loopback, to the one that its path names). The store is the source of truth; this is a cache of at
most `sessions.cached` trees, which never drops a session with state that is not in the store.
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

import shortuuid

from proxy.config import SessionsConfig
from proxy.conversation.message_keys import KnownKeys
from proxy.errors import ProxyError, RequestError, SessionError, StoreError
from proxy.records import (
    REFUSED,
    Mark,
    Origin,
    RuleAction,
    Session,
    SessionKind,
    SessionStatus,
    Turn,
    TurnStatus,
)
from proxy.serving.asked import Asked
from proxy.serving.branch import LiveBranch, open_branch
from proxy.serving.provider_tools import SessionResults
from proxy.serving.retries import RetryBook
from proxy.serving.returned_calls import ReturnedCalls
from proxy.settings.profiles import AgentProfile, Profiles
from proxy.store.protocol import Store, Undelivered
from proxy.token_tree.tree import TokenTree
from proxy.wire.fields import Note
from proxy.wire.images import Made

MAX_ID_CHARS = 256
MAX_REFUSALS = 100
"""Number of refused calls per session that are recorded as events; the metrics count all."""
MAX_UNKNOWN_FIELDS = 100
MAX_PARTS = 20
"""Parts of a request that an event names; it counts all."""
MAX_NOTED = 2000
"""Parts of histories per session about which an event tells."""
CLOSING = ""
"""Wakes the listeners of a session that has ended. It is not sent to them as an event."""
_SEGMENT = re.compile(r"[A-Za-z0-9._~@:+=,-]+")
_RESERVED = frozenset(
    {".", "..", "v1", "sessions", "engines", "health", "ready", "metrics", "policy_version"}
    | {"policies", "rewards", "events", "trajectories", "complete", "openapi.json"}
)
"""Path segments that name routes."""

NOTICE_S = 1.0
"""How long a call waits until an equal one notices that its agent has left."""


class RegisteredCall(Protocol):
    """What a session knows of a call: whoever serves a call registers it in `running`."""

    turns: list[int]
    """Index of each answer's turn; empty while placing."""
    settled: asyncio.Event
    """Set when it is known whether the answers have arrived."""

    @property
    def answers(self) -> int:
        """Number of answers that the agent wants."""
        ...

    @property
    def ended(self) -> bool: ...

    @property
    def deserted(self) -> bool:
        """Whether the answers are recorded, and no agent is there to get them."""
        ...

    def abort(self, why: ProxyError) -> None:
        """Ends the call early with the error `why`. Further calls have no effect."""
        ...


@dataclass(slots=True)
class LiveSession:
    """A session with its tree in memory. It knows calls only as far as `RegisteredCall`.

    Invariant: a process has at most one LiveSession per session. It stays in memory while `in_use`.
    """

    session: Session
    profile: AgentProfile
    branch: LiveBranch | None = None
    tree: TokenTree = field(init=False)
    retries: RetryBook = field(default_factory=RetryBook)
    known_keys: KnownKeys = field(default_factory=KnownKeys)
    returned: ReturnedCalls = field(default_factory=ReturnedCalls)
    results: SessionResults = field(default_factory=SessionResults)
    noted: set[int] = field(default_factory=set)
    """Hashes of what events have already told about the agent's history, which each call repeats;
    at most MAX_NOTED."""
    running: set[RegisteredCall] = field(default_factory=set)
    """Calls that have not ended, or whose answer is still on its way."""
    placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is placed and its intents are recorded."""
    own: set[int] = field(default_factory=set)
    """Turns begun by this process that are open, or whose delivery is not recorded yet."""
    unsettled: frozenset[int] = frozenset()
    """Turns of other processes that were open or on their way when the tree was read."""
    unheld: frozenset[int] = frozenset()
    """Those of `unsettled` whose process no longer holds the session, because it is stopping."""
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    """Attempts to close turns. Until they succeed, it is unknown whether the index is free."""
    stale: bool = False
    """A write failed, so the tree may differ from the store; the next call reads it again."""
    users: int = 0
    """Number of HTTP requests that were authorised and not answered yet."""
    refusals: int = 0
    images: set[str] = field(default_factory=set)
    """The sha256 of images that this process has stored for the session."""
    made_images: dict[str, Made | None] = field(default_factory=dict)
    """What this process has fetched and rendered for the session, each once, by the sha256 of the
    URL or the document."""
    unknown_fields: set[str] = field(default_factory=set)
    """Unknown fields of its requests that are recorded as events."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: set[asyncio.Queue[dict[str, Any]]] = field(default_factory=set)

    @property
    def in_use(self) -> bool:
        """Whether the session must stay in memory."""
        return bool(self.users or self.running or self.own or self.listeners)

    @property
    def in_flight(self) -> list[RegisteredCall]:
        """The calls that have not ended."""
        return [call for call in self.running if not call.ended]

    @property
    def up_to_date(self) -> bool:
        """Whether the tree has all turns, and no other process is known to hold the session."""
        return not self.stale and self.unsettled <= self.unheld

    def read(self, turns: Sequence[Turn], undelivered: Undelivered) -> None:
        """Replaces the tree by the store's turns."""
        self.tree = TokenTree(turns, follows=self.profile.follows)
        still_open = {turn.index for turn in turns if turn.status is TurnStatus.OPEN}
        self.unsettled = frozenset((still_open | undelivered.pending) - self.own)
        self.retries.lost = (self.retries.lost & self.own) | (undelivered.lost - self.own)
        if self.branch is not None:
            self.branch.read(turns, undelivered, self.own)

    async def record(self, store: Store, kind: str, **data: Any) -> None:
        """Stores an event and sends it to all listeners."""
        seq = await store.add_event(self.session.session_id, kind, data)
        self.publish(kind, seq=seq, **data)

    async def note(self, store: Store, index: int, asked: Asked) -> list[Note]:
        """Records events for what turn `index` is the first one to have in its request: calls that
        the agent's client has tidied, and parts that the model sees as text or not at all. Returns
        the latter."""
        calls = [
            {"turn": each.turn, "id": each.call.id, "name": each.call.name, "changes": each.changes}
            for each in asked.tidied
            if self._is_new((each.call.id, each.changes))
        ]
        if calls:
            await self.record(store, "tidied", index=index, calls=calls)
        new = [note for note in asked.request.notes if self._is_new(note)]
        for kind in dict.fromkeys(note.kind for note in new):
            parts = [
                {"type": each.name, "at": each.place, "text": each.text}
                for each in new
                if each.kind == kind
            ]
            await self.record(store, kind, index=index, count=len(parts), parts=parts[:MAX_PARTS])
        return new

    def _is_new(self, what: Hashable) -> bool:
        """Whether no event has told this; remembers it."""
        if len(self.noted) >= MAX_NOTED or hash(what) in self.noted:
            return False
        self.noted.add(hash(what))
        return True

    @property
    def being_sent(self) -> set[int]:
        """Turns whose answers are sampled or on their way."""
        return {index for call in self.running for index in call.turns}

    async def until_deserted_are_settled(self, turns: set[int]) -> None:
        """Returns when the calls of these turns whose agent has left have noticed it, so that a
        repeated request gets their answers."""
        deserted = [c for c in self.running if not turns.isdisjoint(c.turns) and c.deserted]
        with contextlib.suppress(TimeoutError):
            for call in deserted:
                await asyncio.wait_for(call.settled.wait(), NOTICE_S)

    def publish(self, kind: str, **data: Any) -> None:
        """Sends an event to every listener; a listener that is too slow loses events."""
        for queue in self.listeners:
            if not queue.full():
                queue.put_nowait({"kind": kind, "at": time.time(), **data})


class Sessions:
    """Creates sessions, finds them by key or id, and keeps the live ones in memory."""

    def __init__(
        self,
        store: Store,
        config: SessionsConfig,
        profiles: Profiles,
        on_end: Callable[[str], None] = lambda session_id: None,
    ) -> None:
        """`on_end` gets the id of each session that has ended."""
        self._on_end = on_end
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
        origin: Origin | None = None,
    ) -> tuple[Session, str]:
        """Creates a session. Returns it and its API key, which is not stored.

        Raises:
            RequestError: the id cannot be part of a path, or the profile does not exist.
            SessionError: 409, the id exists; see also `Store.create_session`.
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
            sampling={**self._config.recorded, **(sampling or {})},
            profile=profile,
            limits=dict(limits or {}),
            metadata=dict(metadata or {}),
            origin=origin,
        )
        if not await self._store.create_session(session):
            raise SessionError(f"session {session_id!r} already exists", status=409)
        return session, key

    async def authorise(self, key: str | None, trial_id: str | None) -> LiveSession:
        """The session that a data-plane call belongs to.

        Raises:
            SessionError: 401 the key is missing, unknown or another session's; 409 the session is
                completed; 410 it has expired.
        """
        if trial_id is not None and self._config.auto_create:
            live = await self._find_or_create(check_id(trial_id))
        else:
            live = await self._by_key(key)
            if trial_id is not None and live.session.session_id != trial_id:
                raise _unauthorised()
        if live.session.status is SessionStatus.OPEN and time.time() >= live.session.expires_at:
            await self._end(live, SessionStatus.EXPIRED)
        self._check_open(live.session)
        return live

    async def get(self, session_id: str) -> LiveSession:
        """The session with its tree. Raises SessionError (404) if it does not exist."""
        live = self._live.get(session_id)
        if live is not None and not await self._was_removed(live):
            self._live.move_to_end(session_id)
            return live
        loading = self._loading.get(session_id)
        if loading is None:
            loading = asyncio.ensure_future(self._load(session_id))
            self._loading[session_id] = loading
            loading.add_done_callback(lambda _: self._loaded(session_id, loading))
        live = await asyncio.shield(loading)
        return self._live.setdefault(session_id, live)  # it may have been evicted in between

    async def _was_removed(self, live: LiveSession) -> bool:
        """Whether an ended session is no longer in the store, from which others remove it, or
        another one has its id since. It is forgotten then."""
        ended = live.session
        if ended.status is SessionStatus.OPEN or live.in_use:
            return False
        stored = await self._store.get_session(ended.session_id)
        if stored is not None and stored.created_at == ended.created_at:
            return False
        if self._live.get(ended.session_id) is live:
            del self._live[ended.session_id]
            self._ids_by_key.pop(ended.key_hash, None)
        return True

    def _loaded(self, session_id: str, loading: asyncio.Future[LiveSession]) -> None:
        if self._loading.get(session_id) is loading:
            del self._loading[session_id]
        if not loading.cancelled():
            loading.exception()  # marks it as retrieved, because all waiting requests may have left

    @property
    def in_memory(self) -> list[LiveSession]:
        """The sessions whose trees are cached."""
        return list(self._live.values())

    async def complete(self, session_id: str) -> None:
        """Ends a session: later calls get 409, calls in flight are cut."""
        await self._end(await self.get(session_id), SessionStatus.COMPLETED)

    async def end_by(self, mark: Mark, session_id: str) -> None:
        """Completes an open session, if the rule of the mark says so."""
        if mark.action is RuleAction.END:
            live = await self.get(session_id)
            if live.session.status is SessionStatus.OPEN:
                await self.complete(session_id)

    async def delete(self, session_id: str) -> None:
        live = await self.get(session_id)
        await self._store.delete_session(session_id)
        live.session.status = SessionStatus.COMPLETED
        self._ids_by_key.pop(live.session.key_hash, None)
        live.publish("deleted")
        self._close(live, "deleted")
        self._live.pop(session_id, None)

    def ended_elsewhere(self, session_id: str, kind: str) -> None:
        """Ends the session's calls in this process after another one completed or deleted it. That
        process has sent the event to all listeners."""
        live = self._live.pop(session_id, None)
        if live is not None:
            live.session.status = SessionStatus.COMPLETED
            self._ids_by_key.pop(live.session.key_hash, None)
            self._close(live, kind)

    async def record_event(self, live: LiveSession, kind: str, **data: Any) -> None:
        """See `LiveSession.record`."""
        await live.record(self._store, kind, **data)

    async def refused(self, live: LiveSession, **what: Any) -> None:
        """Records a call that was answered with an error, at most MAX_REFUSALS per session."""
        live.refusals += 1
        if live.refusals <= MAX_REFUSALS:  # SessionError: it is removed
            with contextlib.suppress(StoreError, SessionError):
                await self.record_event(live, REFUSED, **what)

    async def unknown_fields(self, live: LiveSession, route: str, names: list[str]) -> None:
        """Records the names that no request of the session had before, at most
        MAX_UNKNOWN_FIELDS."""
        new = [name for name in names if name not in live.unknown_fields]
        if not new or len(live.unknown_fields) >= MAX_UNKNOWN_FIELDS:
            return
        live.unknown_fields.update(new)
        with contextlib.suppress(StoreError):
            await self.record_event(live, "unknown_fields", route=route, names=new)

    async def _end(self, live: LiveSession, status: SessionStatus) -> None:
        now = time.time()
        await self._store.set_status(live.session.session_id, status, now)
        live.session.status, live.session.completed_at = status, now
        await self.record_event(live, status.value)
        self._close(live, status.value)

    def _close(self, live: LiveSession, kind: str) -> None:
        live.closed.set()
        live.known_keys.clear()
        live.publish(CLOSING)
        for call in list(live.running):
            call.abort(_ended(live.session, kind))
        self._on_end(live.session.session_id)

    async def _find_or_create(self, session_id: str) -> LiveSession:
        try:
            return await self.get(session_id)
        except SessionError as error:
            if error.status != 404:
                raise
        try:
            await self.create(session_id, kind=SessionKind.EVAL)
        except SessionError as error:
            if error.status != 409:  # 409: another call created it first
                raise
        self._loading.pop(session_id, None)  # it may have begun before the session existed
        return await self.get(session_id)

    async def _by_key(self, key: str | None) -> LiveSession:
        if not key:
            raise SessionError(
                "missing API key: set OPENAI_API_KEY (or ANTHROPIC_API_KEY) to the session's key",
                status=401,
            )
        digest = key_hash(key)
        live = await self.get(self._ids_by_key.get(digest) or await self._find(digest))
        if not hmac.compare_digest(live.session.key_hash, digest):
            session_id = await self._find(digest)  # so `live` had the id before, and was removed
            if self._live.get(session_id) is live:
                del self._live[session_id]
            live = await self.get(session_id)
            if not hmac.compare_digest(live.session.key_hash, digest):
                raise _unauthorised()
        return live

    async def _find(self, digest: bytes) -> str:
        """The id of the session with this key. Raises SessionError (401)."""
        session = await self._store.find_by_key(digest)
        if session is None:
            raise _unauthorised()
        self._ids_by_key[digest] = session.session_id
        while len(self._ids_by_key) > 4 * self._config.cached:
            self._ids_by_key.popitem(last=False)
        return session.session_id

    def _check_open(self, session: Session) -> None:
        if session.status is SessionStatus.COMPLETED:
            raise _ended(session, "completed")
        if session.status is SessionStatus.EXPIRED:
            raise SessionError(f"session {session.session_id!r} has expired", status=410)

    async def _load(self, session_id: str) -> LiveSession:
        session = await self._store.get_session(session_id)
        if session is None:
            raise SessionError(f"session {session_id!r} does not exist", status=404)
        turns = await self._store.get_turns(session_id)
        undelivered = await self._store.undelivered(session_id)
        profile, branch = self._profiles.get(session.profile), None
        if session.origin is not None:
            branch = await open_branch(self._store, session, session.origin, turns, profile)
        if session_id in self._live:  # it was read twice concurrently
            return self._live[session_id]
        live = LiveSession(session, profile, branch)
        live.read(turns, undelivered)
        if session.status is not SessionStatus.OPEN:
            live.closed.set()
        self._live[session_id] = live
        self._evict()
        return live

    def _evict(self) -> None:
        excess = len(self._live) - self._config.cached
        if excess > 0:
            all_idle = (i for i, s in self._live.items() if not s.in_use)
            for session_id in list(itertools.islice(all_idle, excess)):
                del self._live[session_id]


def check_id(session_id: str) -> str:
    """Returns the id. Raises RequestError if it cannot be part of a path."""
    segments = session_id.split("/")
    wrong = [s for s in segments if not _SEGMENT.fullmatch(s) or s.lower() in _RESERVED]
    if len(session_id) > MAX_ID_CHARS or wrong:
        raise RequestError(
            f"trial_id: {session_id[:MAX_ID_CHARS]!r} is not a valid id: use at most "
            f"{MAX_ID_CHARS} characters of A-Z a-z 0-9 . _ ~ @ : + = , - and /, "
            "and no name of a route between slashes",
            param="trial_id",
        )
    return session_id


def key_hash(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()


def _ended(session: Session, kind: str) -> SessionError:
    return SessionError(f"session {session.session_id!r} is {kind}", status=409)


def _unauthorised() -> SessionError:
    return SessionError(
        "this API key does not belong to the session; use the key that its creation returned",
        status=401,
    )
