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
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent_loop.swarm.batching import SwarmSettings
from agent_loop.swarm.changes import Changes
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.table import EpisodeTable
from agent_loop.swarm.wire import (
    Claim,
    Claimed,
    End,
    EpisodeKind,
    EpisodeState,
    EpisodeView,
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
    """A claimed episode."""

    view: EpisodeView
    key_hash: bytes
    lease_s: float
    lease_until: float
    ends_at: float
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def deadline(self) -> float:
        return min(self.lease_until, self.ends_at)


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
        return [one.view for one in self._open.values()]

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
            ends_at=opened.ends_at,
            version=version,
        )

    async def heartbeat(self, episode_id: str, key: str) -> EpisodeView:
        """Extends the lease. What is returned says whether the episode goes on."""
        view = await self._owned(episode_id, key)
        if one := self._open.get(episode_id):
            one.lease_until = time.time() + one.lease_s
        return view

    async def end(self, episode_id: str, key: str, end: End) -> EpisodeView:
        """Rewarded and on disk when this returns."""
        view = await self._owned(episode_id, key)
        one = self._open.get(episode_id)
        if one is None:
            return _ended_before(view, end)
        async with one.ending:
            if self._open.get(episode_id) is not one:
                return _ended_before((await self._known(episode_id))[0], end)
            try:
                await self._record(one.view)
            except SwarmError:
                self._changes.notify()  # its lease may have run out meanwhile
                raise
            one.view.task_id, one.view.reward = end.task_id, end.reward
            one.view.reward_parts, one.view.metadata = end.reward_parts, end.metadata
            is_eval = one.view.kind == "eval"
            state = EpisodeState.EVALUATED if is_eval else EpisodeState.ENDED
            await self._leave(one, state)
            if not is_eval:
                self.ended.append(one.view)
        self._changes.notify()
        return one.view

    async def abort(self, episode_id: str, key: str, reason: str) -> EpisodeView:
        view = await self._owned(episode_id, key)
        one = self._open.get(episode_id)
        if one is None:
            return view
        async with one.ending:
            if self._open.get(episode_id) is one:
                await self._give_up(one, EpisodeState.ABORTED, reason or "by its client")
        return one.view

    async def expire(self) -> float | None:
        """Reclaims what outlived its lease or lifetime; when to look again, in Unix seconds."""
        now = time.time()
        for one in [one for one in self._open.values() if one.deadline <= now]:
            if not one.ending.locked():
                async with one.ending:
                    ended = "lifetime" if one.ends_at <= now else "lease"
                    await self._give_up(one, EpisodeState.EXPIRED, f"its {ended} ran out")
        waiting = [one.deadline for one in self._open.values() if not one.ending.locked()]
        return min(waiting, default=None)

    async def abandon(self, reason: str, *, kind: EpisodeKind | None = None) -> None:
        """Aborts all open ones, their sessions where the proxy still is."""
        for one in [one for one in self._open.values() if kind in (None, one.view.kind)]:
            async with one.ending:
                if one.view.episode_id in self._open:
                    await self._give_up(one, EpisodeState.ABORTED, reason)

    def _reserve(self, wanted: Claim, version: int) -> tuple[_Open, str]:
        now, key = time.time(), secrets.token_urlsafe(24)
        view = EpisodeView(
            episode_id=f"e-{secrets.token_hex(8)}",
            client_id=wanted.client_id,
            kind=wanted.kind,
            state=EpisodeState.CLAIMED,
            task_id=wanted.task_id,
            source=wanted.source,
            version=version,
            generation=self.generation,
            claimed_at=now,
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

    async def _record(self, view: EpisodeView) -> None:
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
        if view.kind == "train":
            data = encode_record(session, turns)
            await asyncio.to_thread(_write_durably, self.record_file(view.episode_id), data)

    async def _leave(self, one: _Open, state: EpisodeState, reason: str | None = None) -> None:
        one.view.state, one.view.reason, one.view.ended_at = state, reason, time.time()
        await self._table.update([one.view])
        del self._open[one.view.episode_id]

    async def _give_up(self, one: _Open, state: EpisodeState, reason: str) -> None:
        if self._proxy is not None:
            with contextlib.suppress(ProxyClientError):  # the proxy is gone, the session with it
                await self._proxy.complete(one.view.episode_id)
        await self._leave(one, state, reason)
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
    if (view.task_id, view.reward) != (end.task_id, end.reward):
        raise SwarmError(
            f"episode {view.episode_id} ended before, with reward {view.reward} for task "
            f"{view.task_id!r}",
            "conflict",
        )
    return view


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _write_durably(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)
