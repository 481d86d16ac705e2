"""Claimed episodes, from their claim to their end, abort or expiry.

Invariant: an episode belongs to one claim, with an id, a key and a session of its own; it ends at
most once, its recording and reward on disk before that is said. What its lease or lifetime
outlived never ends: its session is closed, so a late agent writes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent_loop.swarm.batching import SwarmSettings
from agent_loop.swarm.changes import Changes
from agent_loop.swarm.durable import write_durably
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.joint import NEVER, outcome
from agent_loop.swarm.table import EpisodeTable
from agent_loop.swarm.wire import (
    Claim,
    Claimed,
    Decider,
    End,
    EpisodeKind,
    EpisodeState,
    EpisodeView,
    Prepare,
    TrainerHello,
)
from proxy.client import ProxyClientError, SessionHandle
from proxy.record_format import encode_record
from proxy.records import Session, SessionKind, Turn

SESSION_MARGIN_S = 300.0
"""A session outlives its episode by this: for its reward and collection."""


class Proxy(Protocol):
    """`proxy.client.ProxyClient`, as far as the swarm needs it."""

    async def create_session(
        self,
        trial_id: str | None = None,
        *,
        kind: SessionKind,
        sampling: dict[str, object] | None = None,
        profile: str = "default",
        limits: dict[str, object] | None = None,
        metadata: dict[str, object] | None = None,
        ttl_s: float | None = None,
    ) -> SessionHandle: ...

    async def get_turns(self, trial_id: str) -> tuple[Session, list[Turn]]: ...

    async def complete(self, trial_id: str) -> None: ...


@dataclass(slots=True)
class _Open:
    """A claimed or prepared episode. Times are of the monotonic clock: a jump of the other one
    reclaims nothing."""

    view: EpisodeView
    key_hash: bytes
    lease_s: float
    lease_until: float
    ends_at: float
    decider: Decider | None = None
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_prepared(self) -> bool:
        return self.view.state is EpisodeState.PREPARED

    @property
    def deadline(self) -> float:
        return self.lease_until if self.is_prepared else min(self.lease_until, self.ends_at)


class Episodes:
    """The open ones in memory, all of them in the table."""

    def __init__(
        self, settings: SwarmSettings, table: EpisodeTable, records: Path, changes: Changes
    ) -> None:
        self.settings = settings
        self._table = table
        self._records = records
        self._changes = changes
        self._open: dict[str, _Open] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._proxy: Proxy | None = None
        self._hello: TrainerHello | None = None
        self.ended: list[EpisodeView] = []
        """For the next batch, in the order in which they ended."""
        self.generation = 0
        """Of the trainer, counted by its starts."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_views(self) -> list[EpisodeView]:
        return [one.view for one in self._open.values() if not one.is_prepared]

    @property
    def prepared_views(self) -> list[EpisodeView]:
        return [one.view for one in self._open.values() if one.is_prepared]

    @property
    def have_proxy(self) -> bool:
        return self._proxy is not None

    def connect(self, hello: TrainerHello | None, proxy: Proxy | None) -> None:
        """Sessions are made by `proxy` from now on."""
        self._hello, self._proxy = hello, proxy

    def record_file(self, episode_id: str) -> Path:
        return self._records / f"{episode_id}.record"

    async def claim(self, wanted: Claim, version: int) -> Claimed:
        """The place among the open ones is taken before anything is awaited: quotas hold."""
        opened, key = self._reserve(wanted, version)
        try:
            session = await self._session(opened.view)
            await self._table.insert(opened.view, opened.key_hash)
        except BaseException:
            self._open.pop(opened.view.episode_id, None)
            self._changes.notify()
            raise
        self._changes.notify()
        return Claimed(
            episode_id=opened.view.episode_id,
            key=key,
            api_key=session.api_key,
            base_url=session.base_url,
            anthropic_base_url=session.anthropic_base_url,
            kind=wanted.kind,
            task_id=wanted.task_id,
            lease_s=opened.lease_s,
            ends_at=opened.view.claimed_at + self.settings.max_life_s,
            version=version,
        )

    async def heartbeat(self, episode_id: str, key: str) -> EpisodeView:
        """Extends the lease. What is returned says whether the episode goes on."""
        view = await self._owned(episode_id, key)
        if one := self._open.get(episode_id):
            one.lease_until = time.monotonic() + one.lease_s
        return view

    async def outcome(self, episode_id: str, key: str) -> EpisodeState:
        """For those that end with it: its key is all that they have."""
        return (await self._owned(episode_id, key)).state

    async def end(self, episode_id: str, key: str, end: End) -> EpisodeView:
        """Rewarded and on disk when this returns."""
        view = await self._owned(episode_id, key)
        one = self._open.get(episode_id)
        if one is None:
            return _ended_before(view, end)
        async with self._ending(one):
            if self._open.get(episode_id) is not one:
                return _ended_before((await self._known(episode_id))[0], end)
            if one.is_prepared:
                _ended_before(one.view, end)
            else:
                await self._record(one.view, end)
            await self._finish(one, **_told(end))
        return one.view

    async def prepare(self, episode_id: str, key: str, wanted: Prepare) -> EpisodeView:
        """Everything of its end that can fail is done; `end` or `abort` says if it counts."""
        view = await self._owned(episode_id, key)
        one = self._open.get(episode_id)
        if one is None:
            return _ended_before(view, wanted.end)
        async with self._ending(one):
            if self._open.get(episode_id) is not one or one.is_prepared:
                return _ended_before((await self._known(episode_id))[0], wanted.end)
            await self._record(one.view, wanted.end)
            changes = {"state": EpisodeState.PREPARED, **_told(wanted.end)}
            await self._table.prepare(one.view.model_copy(update=changes), wanted.decider)
            one.view, one.decider = one.view.model_copy(update=changes), wanted.decider
            one.lease_until = time.monotonic() + one.lease_s
        return one.view

    async def take_up(self, view: EpisodeView) -> None:
        """An episode that the last server left prepared."""
        _, key_hash = await self._known(view.episode_id)
        lease_s = self.settings.lease_s
        until = time.monotonic() + lease_s
        decider = await self._table.decider(view.episode_id)
        self._open[view.episode_id] = _Open(view, key_hash, lease_s, until, until, decider)

    async def abort(self, episode_id: str, key: str, reason: str) -> EpisodeView:
        view = await self._owned(episode_id, key)
        one = self._open.get(episode_id)
        if one is None:
            return view
        async with self._ending(one):
            if self._open.get(episode_id) is one:
                await self._give_up(one, EpisodeState.ABORTED, reason or "by its client")
        return one.view

    async def expire(self) -> float | None:
        """Reclaims what outlived its lease or lifetime; when to look again (monotonic)."""
        now = time.monotonic()
        for one in [one for one in self._open.values() if one.deadline <= now]:
            if one.ending.locked():
                continue
            if one.is_prepared and one.decider is not None:
                one.lease_until = now + one.lease_s
                task = asyncio.create_task(self._settle(one, one.decider))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)
                continue
            async with one.ending:
                ended = "lifetime" if one.ends_at <= now and not one.is_prepared else "lease"
                await self._give_up(one, EpisodeState.EXPIRED, f"its {ended} ran out")
        waiting = [one.deadline for one in self._open.values() if not one.ending.locked()]
        return min(waiting, default=None)

    async def abandon(self, reason: str, *, kind: EpisodeKind | None = None) -> None:
        """Aborts the claimed ones, their sessions where the proxy still is. Prepared ones need no
        trainer any more, and are not ours to decide."""
        for one in [one for one in self._open.values() if kind in (None, one.view.kind)]:
            async with one.ending:
                if self._open.get(one.view.episode_id) is one and not one.is_prepared:
                    await self._give_up(one, EpisodeState.ABORTED, reason)

    async def close(self) -> None:
        """Prepared ones stay so, for the next server."""
        for task in self._settling:
            task.cancel()
        await self.abandon("the swarm server ends")

    async def _settle(self, one: _Open, decider: Decider) -> None:
        state = await outcome(decider)
        if state is None:
            return  # asked again in a lease
        async with self._ending(one):
            if self._open.get(one.view.episode_id) is not one:
                return
            if state in NEVER:
                why = f"the episode that it ends with, {decider.episode_id}, is {state.value}"
                await self._give_up(one, EpisodeState.ABORTED, why)
            else:
                await self._finish(one)

    @asynccontextmanager
    async def _ending(self, one: _Open) -> AsyncIterator[None]:
        """While it is held no lease runs out; then whoever waits looks again."""
        async with one.ending:
            try:
                yield
            finally:
                self._changes.notify()

    def _reserve(self, wanted: Claim, version: int) -> tuple[_Open, str]:
        now, key = time.monotonic(), secrets.token_urlsafe(24)
        view = EpisodeView(
            episode_id=f"e-{secrets.token_hex(8)}",
            client_id=wanted.client_id,
            kind=wanted.kind,
            state=EpisodeState.CLAIMED,
            task_id=wanted.task_id,
            source=wanted.source,
            version=version,
            generation=self.generation,
            claimed_at=time.time(),
        )
        lease_s = wanted.lease_s or self.settings.lease_s
        opened = _Open(view, _hash(key), lease_s, now + lease_s, now + self.settings.max_life_s)
        self._open[view.episode_id] = opened
        return opened, key

    async def _session(self, view: EpisodeView) -> SessionHandle:
        assert self._proxy is not None
        assert self._hello is not None
        train = view.kind == "train"
        try:
            return await self._proxy.create_session(
                view.episode_id,
                kind=SessionKind.TRAIN if train else SessionKind.EVAL,
                sampling=dict(self._hello.sampling) if train else {},
                profile=self._hello.profile,
                limits=dict(self._hello.session_limits),
                metadata={"client_id": view.client_id, "source": view.source},
                ttl_s=self.settings.max_life_s + SESSION_MARGIN_S,
            )
        except ProxyClientError as error:
            raise SwarmError(f"no session could be made: {error}", "unavailable") from error

    async def _record(self, view: EpisodeView, end: End) -> None:
        """Closes the session and puts its recording, if it is to be trained, on disk."""
        if self._proxy is None:
            raise SwarmError("the engine is away", "unavailable")
        try:
            await self._proxy.complete(view.episode_id)
            session, turns = await self._proxy.get_turns(view.episode_id)
        except ProxyClientError as error:
            raise SwarmError(f"its recording cannot be had: {error}", "unavailable") from error
        if not any(turn.sampled for turn in turns):
            raise SwarmError(
                f"episode {view.episode_id} has no answered model call: abort it", "invalid"
            )
        answered = [turn.index for turn in turns if turn.sampled]
        if unknown := sorted(end.turn_rewards.keys() - set(answered)):
            raise SwarmError(
                f"turn_rewards of calls {unknown}: answered are the calls {answered}", "invalid"
            )
        if view.kind == "train":
            data = encode_record(session, turns)
            try:
                await asyncio.to_thread(write_durably, self.record_file(view.episode_id), data)
            except OSError as error:
                raise SwarmError(f"its recording cannot be kept: {error}", "unavailable") from error

    async def _finish(self, one: _Open, **told: object) -> None:
        is_eval = one.view.kind == "eval"
        await self._leave(one, EpisodeState.EVALUATED if is_eval else EpisodeState.ENDED, **told)
        if not is_eval:
            self.ended.append(one.view)

    async def _leave(self, one: _Open, state: EpisodeState, **changes: object) -> None:
        await self._table.change([one.view], state=state, ended_at=time.time(), **changes)
        del self._open[one.view.episode_id]

    async def _give_up(self, one: _Open, state: EpisodeState, reason: str) -> None:
        if self._proxy is not None:
            with contextlib.suppress(ProxyClientError):  # the proxy is gone, the session with it
                await self._proxy.complete(one.view.episode_id)
        await self._leave(one, state, reason=reason)
        self.record_file(one.view.episode_id).unlink(missing_ok=True)  # if it was prepared
        self._changes.notify()

    async def _owned(self, episode_id: str, key: str) -> EpisodeView:
        view, key_hash = await self._known(episode_id)
        if not hmac.compare_digest(_hash(key), key_hash):
            raise SwarmError(f"episode {episode_id} was claimed with another key", "not_yours")
        return view

    async def _known(self, episode_id: str) -> tuple[EpisodeView, bytes]:
        if one := self._open.get(episode_id):
            return one.view, one.key_hash
        known = await self._table.get(episode_id)
        if known is None:
            raise SwarmError(f"no episode {episode_id!r}", "not_found")
        return known


def _ended_before(view: EpisodeView, end: End) -> EpisodeView:
    """The same end again is the same answer; anything else is said."""
    if view.state in (EpisodeState.ABORTED, EpisodeState.EXPIRED):
        raise SwarmError(
            f"episode {view.episode_id} is {view.state.value} ({view.reason}): its reward comes "
            "too late; claim another",
            "late",
        )
    told = _told(end)
    if any(getattr(view, name) != told[name] for name in ("task_id", "reward", "turn_rewards")):
        raise SwarmError(
            f"episode {view.episode_id} ended before, with reward {view.reward} for task "
            f"{view.task_id!r}",
            "conflict",
        )
    return view


def _told(end: End) -> dict[str, object]:
    """What an end says of its episode."""
    return {name: getattr(end, name) for name in End.model_fields}


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
