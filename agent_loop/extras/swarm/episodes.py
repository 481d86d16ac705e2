"""The operations on episodes: claim, heartbeat, prepare, end, abort and expiry.

Invariant: an episode belongs to one claim, with an id, a key and a session of its own. It ends at
most once, and its recording and reward are on disk before the answer says so. An episode that
outlived its lease or its lifetime never ends: its session is closed, so that a late agent cannot
add to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Any

from agent_loop.extras.swarm.admission import Admission
from agent_loop.extras.swarm.batching import Collected
from agent_loop.extras.swarm.config import BatchPlan, SwarmConfig
from agent_loop.extras.swarm.episode import RECLAIMED, Episode
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.joint import outcome
from agent_loop.extras.swarm.sessions import EpisodeSessions, Proxy
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import (
    Claim,
    Claimed,
    EpisodeEnd,
    EpisodeKind,
    EpisodeState,
    EpisodeView,
    Prepare,
    TrainerHello,
)
from agent_loop.producers.rollout_config import RolloutConfig

SPARE_DEADLINES = 64
"""Number of outdated deadlines from which it pays to remove them."""
NO_PLAN = BatchPlan(SwarmConfig(), RolloutConfig())
"""The plan that applies until a trainer has reported its own."""


class Episodes:
    """All open and collected episodes; the finished ones are in the table."""

    def __init__(self, table: EpisodeTable, notify: Callable[[], None]) -> None:
        """`notify` is called after every change."""
        self._table = table
        self._notify = notify
        self._open: dict[str, Episode] = {}
        self._deadlines: list[tuple[float, int, Episode]] = []
        self._pushes = count()
        self._settling: set[asyncio.Task[None]] = set()
        self._trainer: EpisodeSessions | None = None
        self.collected = Collected(NO_PLAN)
        """Ended episodes that wait for the next batch."""
        self.admission = Admission(self.collected, self._new_episode, self._withdraw)
        self.generation = 0
        """Number of trainer starts. Versions of different generations are not comparable."""
        self.version = 0
        """The policy's version in this generation."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[EpisodeView]:
        """The open episodes, then the collected ones."""
        return (episode.view for episode in chain(self._open.values(), self.collected))

    @property
    def plan(self) -> BatchPlan:
        return self.collected.plan

    @property
    def has_trainer(self) -> bool:
        return self._trainer is not None

    def connect(self, hello: TrainerHello, proxy: Proxy) -> None:
        """To be called when the trainer is up. Uses its proxy for sessions and its plan for
        batches."""
        self._trainer = EpisodeSessions(hello, proxy)
        self.collect_again(self.collected, BatchPlan(hello.swarm, hello.rollout))

    def disconnect(self) -> None:
        self._trainer = None

    def collect_again(self, episodes: Iterable[Episode], plan: BatchPlan) -> None:
        """Makes these episodes, in this order, wait for the next batch, which follows `plan`."""
        is_agreed = self.collected.is_agreed
        self.collected = Collected(plan, list(episodes))
        self.collected.is_agreed = is_agreed
        self.admission.replace(self.collected)

    async def take_up(self) -> None:
        """Continues with the episodes that the previous server left prepared or ended."""
        for episode in await self._table.in_state(EpisodeState.PREPARED):
            episode.lease_s = self.plan.swarm.lease_s
            episode.extend_lease(time.monotonic())
            self._open[episode.episode_id] = episode
            self.admission.add(episode.view)
            self.watch(episode)
        for episode in await self._table.in_state(EpisodeState.ENDED):
            self.collected.add(episode)
            self.admission.add(episode.view)

    async def move(self, episodes: Sequence[Episode], state: EpisodeState, **changes: Any) -> None:
        """Changes the episodes' state, first on disk and then in memory. Waiting claims get the
        places that become free."""
        before = await self._table.move(episodes, state, **changes)
        for episode, old in zip(episodes, before, strict=True):
            self.admission.moved(old, episode.view)
        self.collected.remove(e for e, old in zip(episodes, before, strict=True) if _waits(old))
        for episode in episodes:
            if not episode.is_open:
                self._open.pop(episode.episode_id, None)
            if _waits(episode.view):
                self.collected.add(episode)
        self._forget_deadlines()
        self.admission.look_at_freed(before)
        self._notify()

    async def claim(self, wanted: Claim, refused: Callable[[str], SwarmError]) -> Claimed:
        """A new episode, as soon as one can be given out.

        Raises what `refused` makes of the reason, after `wanted.wait_s`; `unavailable`: the proxy
        gave no session.
        """
        episode = await self.admission.enter(wanted, refused)
        key = secrets.token_urlsafe(24)
        async with self._ending(episode):
            try:
                sessions = self._sessions
                session = await sessions.open(episode.view)
                episode.key_hash = _hash(key)
                try:
                    await self._table.insert(episode)
                except SwarmError:
                    await sessions.close(episode.episode_id)
                    raise
                episode.extend_lease(time.monotonic())  # its claimant has it from now on
            except BaseException:
                self._withdraw(episode)
                raise
        return Claimed(
            episode_id=episode.episode_id,
            key=key,
            api_key=session.api_key,
            base_url=session.base_url,
            anthropic_base_url=session.anthropic_base_url,
            kind=wanted.kind,
            task_id=wanted.task_id,
            lease_s=episode.lease_s,
            ends_at=episode.view.claimed_at + self.plan.swarm.max_life_s,
            version=episode.view.version,
        )

    async def heartbeat(self, episode_id: str, key: str) -> EpisodeView:
        """Extends the lease. The state in the answer says whether the episode continues."""
        episode = await self._owned(episode_id, key)
        if episode.is_open:
            episode.extend_lease(time.monotonic())
        return episode.view

    async def outcome(self, episode_id: str, key: str) -> EpisodeState:
        """The episode's state, for the servers whose episodes end together with it; they have its
        key and no token."""
        return (await self._owned(episode_id, key)).state

    async def end(self, episode_id: str, key: str, end: EpisodeEnd) -> EpisodeView:
        """Ends the episode with its reward; both are on disk when this returns."""
        async with self._ending(await self._owned(episode_id, key)) as episode:
            if episode.state is not EpisodeState.CLAIMED:
                _require_same(episode.view, end)
            if episode.is_open:
                if not episode.is_prepared:
                    await self._record(episode.view, end)
                await self._finish(episode, **_reported(end))
        return episode.view

    async def prepare(self, episode_id: str, key: str, wanted: Prepare) -> EpisodeView:
        """Does everything of the episode's end that can fail; `end` or `abort` decides whether it
        counts."""
        async with self._ending(await self._owned(episode_id, key)) as episode:
            if episode.state is not EpisodeState.CLAIMED:
                return _require_same(episode.view, wanted.end)
            await self._record(episode.view, wanted.end)
            reported = _reported(wanted.end)
            await self.move([episode], EpisodeState.PREPARED, decider=wanted.decider, **reported)
            episode.extend_lease(time.monotonic())
        return episode.view

    async def abort(self, episode_id: str, key: str, reason: str) -> EpisodeView:
        """Aborts the episode, so that it never counts. Repeating this is not an error."""
        async with self._ending(await self._owned(episode_id, key)) as episode:
            if episode.is_open:
                await self._give_up(episode, EpisodeState.ABORTED, reason or "by its client")
        return episode.view

    def watch(self, episode: Episode) -> None:
        """To be called when the episode's deadline was set or has become earlier."""
        heappush(self._deadlines, (episode.deadline, next(self._pushes), episode))
        self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Keeps at most two deadlines for each open episode, and `SPARE_DEADLINES` more: those of
        ended ones would keep what their ends reported for up to `swarm.max_life_s`."""
        if len(self._deadlines) > 2 * len(self._open) + SPARE_DEADLINES:
            self._deadlines = [(e.deadline, next(self._pushes), e) for e in self._open.values()]
            heapify(self._deadlines)

    async def expire(self) -> float:
        """Reclaims the episodes whose lease or lifetime ran out. Returns when to look again, on the
        monotonic clock."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            episode = heappop(self._deadlines)[-1]
            if not episode.is_open or episode.ending.locked():
                continue  # `_ending` watches it again
            if episode.deadline > now:
                self.watch(episode)
            elif episode.is_prepared and episode.decider is not None:
                episode.extend_lease(now)
                self.watch(episode)
                self._ask_decider(episode)
            else:
                await self._expire(episode, now)
        return self._deadlines[0][0] if self._deadlines else now + 3600.0

    async def abandon(self, reason: str, *, kind: EpisodeKind | None = None) -> None:
        """Aborts the claimed episodes. Prepared ones need no trainer any more, and others decide
        about them."""
        for episode in [e for e in self._open.values() if kind in (None, e.view.kind)]:
            async with episode.ending:
                if episode.state is EpisodeState.CLAIMED:
                    await self._give_up(episode, EpisodeState.ABORTED, reason)

    async def close(self) -> None:
        """Aborts the claimed episodes. Prepared episodes stay as they are, for the next server."""
        for task in self._settling:
            task.cancel()
        await self.abandon("the swarm server ends")

    def _ask_decider(self, episode: Episode) -> None:
        task = asyncio.create_task(self._settle(episode))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, episode: Episode) -> None:
        assert episode.decider is not None
        decider = episode.decider
        state = await outcome(decider)
        if state is None:
            return  # asked again after a lease
        async with self._ending(episode):
            if not episode.is_open:
                return
            if state in RECLAIMED:
                why = f"the episode that it ends with, {decider.episode_id}, is {state.value}"
                await self._give_up(episode, EpisodeState.ABORTED, why)
            else:
                await self._finish(episode)

    async def _expire(self, episode: Episode, now: float) -> None:
        over = episode.ends_at <= now and not episode.is_prepared
        reason = f"its {'lifetime' if over else 'lease'} ran out"
        async with episode.ending:
            try:
                await self._give_up(episode, EpisodeState.EXPIRED, reason)
            except SwarmError:
                self.watch(episode)  # the disk refused it
                raise

    @asynccontextmanager
    async def _ending(self, episode: Episode) -> AsyncIterator[Episode]:
        """Holds the episode for one end, abort or expiry; its lease cannot run out meanwhile."""
        async with episode.ending:
            try:
                yield episode
            finally:
                if episode.is_open:
                    self.watch(episode)
                    self._notify()

    def _new_episode(self, wanted: Claim) -> Episode:
        now, rules = time.monotonic(), self.plan.swarm
        view = EpisodeView(
            episode_id=f"e-{secrets.token_hex(8)}",
            client_id=wanted.client_id,
            kind=wanted.kind,
            state=EpisodeState.CLAIMED,
            task_id=wanted.task_id,
            source=wanted.source,
            version=self.version,
            generation=self.generation,
            claimed_at=time.time(),
        )
        lease_s = wanted.lease_s or rules.lease_s
        ends_at = now + rules.max_life_s
        episode = Episode(view, b"", lease_s=lease_s, lease_until=now + lease_s, ends_at=ends_at)
        self._open[episode.episode_id] = episode
        self.watch(episode)
        return episode

    def _withdraw(self, episode: Episode) -> None:
        """Removes the episode of a claim that failed before the claimant got it."""
        del self._open[episode.episode_id]
        before, episode.view = episode.view, episode.moved(EpisodeState.ABORTED)
        self.admission.discard(before)

    @property
    def _sessions(self) -> EpisodeSessions:
        if self._trainer is None:
            raise SwarmError(
                "the engine is offline; start it (`agentic-swarm start URL`), then try again",
                "unavailable",
            )
        return self._trainer

    async def _record(self, view: EpisodeView, end: EpisodeEnd) -> None:
        """Closes the session and, if the episode is to be trained, writes its recording to disk."""
        record = await self._sessions.finish(view, end)
        if view.kind == "train":
            await self._table.keep_record(view.episode_id, record)

    async def _finish(self, episode: Episode, **reported: Any) -> None:
        state = EpisodeState.ENDED if episode.is_training else EpisodeState.EVALUATED
        await self.move([episode], state, ended_at=time.time(), **reported)

    async def _give_up(self, episode: Episode, state: EpisodeState, reason: str) -> None:
        if self._trainer is not None:
            await self._trainer.close(episode.episode_id)
        await self.move([episode], state, reason=reason, ended_at=time.time())
        self._table.remove_records([episode])  # of a prepared episode

    async def _owned(self, episode_id: str, key: str) -> Episode:
        episode = self._open.get(episode_id) or await self._table.get(episode_id)
        if episode is None:
            raise SwarmError(
                f"there is no episode {episode_id!r} on this server; claim a new one", "not_found"
            )
        if not hmac.compare_digest(_hash(key), episode.key_hash):
            raise SwarmError(
                f"episode {episode_id} was claimed with another key; send the key that its claim"
                " returned",
                "not_yours",
            )
        return episode


def _waits(view: EpisodeView) -> bool:
    return view.state is EpisodeState.ENDED


def _require_same(view: EpisodeView, end: EpisodeEnd) -> EpisodeView:
    """The same end again gets the same answer; a different end is refused."""
    if view.state in RECLAIMED:
        raise SwarmError(
            f"episode {view.episode_id} is {view.state.value} ({view.reason}): its reward comes "
            "too late; claim another episode",
            "late",
        )
    if (view.task_id, view.reward, view.turn_rewards) != (
        end.task_id,
        end.reward,
        end.turn_rewards,
    ):
        raise SwarmError(
            f"episode {view.episode_id} already ended, with reward {view.reward} for task "
            f"{view.task_id!r}",
            "conflict",
        )
    return view


def _reported(end: EpisodeEnd) -> dict[str, object]:
    """What an end says about its episode."""
    return dict(end)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
