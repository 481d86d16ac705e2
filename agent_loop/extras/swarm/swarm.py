"""The swarm: the engine's state, and which episodes form a batch.

    offline ──▶ booting ──▶ rolling ──▶ syncing ──▶ rolling …      start, hello, batch, next request
                               └──▶ draining ──▶ syncing           with `left_over` drop or train
                                        └──▶ rolling               its batch is not full any more
    any state ──▶ offline (stopped, or the training is done), error (the trainer ended by itself)

Invariant: a batch is handed to the current trainer only after it is marked on disk. It counts as
trained when that trainer asks for the next batch or reports it as trained. If the trainer ends
before that, the batch's episodes wait for a batch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from itertools import chain, islice
from statistics import fmean

from agent_loop.extras.swarm.batching import Selection
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.episodes import Episodes
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.sessions import Proxy
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.wire import (
    BatchView,
    Claim,
    Claimed,
    EngineState,
    EpisodeState,
    EpisodeView,
    Status,
    TrainerHello,
)

CLIENT_MEMORY_S = 600.0
"""Seconds without a request after which `all_clients` no longer waits for a client."""
MAX_CLIENTS = 10_000
"""Number of clients that are remembered: those that were seen last."""
DISK_RETRY_S = 5.0
"""Seconds between a failed write to the disk and the next check of the leases."""

_RUNS = "runs"
"""What the table has of the engine from a trainer's start to its end."""

_log = logging.getLogger(__name__)


class Swarm:
    """Example: swarm = Swarm(EpisodeTable(Path("runs/swarm"))); await swarm.open()"""

    def __init__(self, table: EpisodeTable) -> None:
        self._table = table
        self._changes = 0
        self._changed = asyncio.Event()
        self.episodes = Episodes(table, self._notify)
        self._batched: list[Episode] = []
        self._clients: dict[str, float] = {}
        """Client → when it was last seen; the client that was seen longest ago is first."""
        self._agreed: set[str] = set()
        self._status = Status(state=EngineState.OFFLINE)
        self._drain_until: float | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._request: object | None = None
        """The trainer's request that the next batch answers."""
        self._batching = asyncio.Lock()
        self._has_warned = False

    async def open(self) -> None:
        """Continues with the episodes on disk. Claimed episodes of the previous server are aborted,
        because its proxy has ended."""
        claimed = await self._table.in_state(EpisodeState.CLAIMED)
        reason = "the swarm server was restarted"
        await self._table.move(claimed, EpisodeState.ABORTED, reason=reason)
        untrained = await self._table.in_state(EpisodeState.BATCHED)
        await self._table.move(untrained, EpisodeState.ENDED, batch=None)
        await self.episodes.take_up()
        self._status.batch = int(await self._table.recall("batch") or 0)
        self.episodes.generation = int(await self._table.recall("generation") or 0)
        self._status.state, self._status.detail = _as_found(await self._table.recall("engine"))
        self._reaper = asyncio.create_task(self._reap())

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        await self.episodes.close()
        await self._table.close()

    @property
    def state(self) -> EngineState:
        return self._status.state

    def set_state(self, state: EngineState, detail: str = "") -> None:
        self._status.state, self._status.detail = state, detail
        admission = self.episodes.admission
        if state is EngineState.ROLLING and self.episodes.has_trainer:
            admission.open_engine()
        else:
            admission.close_engine(f"the engine is {state.value}")
        if not state.has_engine:
            why = f"the engine is {state.value}" + (f": {detail}" if detail else "")
            admission.refuse_all(SwarmError(why, "state"))
        self._notify()

    async def status(self, *, since: int | None = None, wait_s: float = 0.0) -> Status:
        """The status now or, with `since`, once the number of changes is greater than `since`, at
        the latest after `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while since is not None and self._changes <= since:
                    await self._changed.wait()
        return self._snapshot()

    def buffer(self, limit: int) -> list[EpisodeView]:
        """Episodes that are open, ended, or in the current batch."""
        batched = (episode.view for episode in self._batched)
        return list(islice(chain(self.episodes, batched), limit))

    # Clients.

    async def claim(self, wanted: Claim) -> Claimed:
        """A new episode, as soon as one can be given out.

        Raises `throttled` or `state` after `wanted.wait_s`, and `state` at once where no engine is
        running or starting.
        """
        self._saw(wanted.client_id)
        if not self.state.has_engine:
            raise self._refused(f"the engine is {self.state.value}")
        return await self.episodes.claim(wanted, self._refused)

    async def heartbeat(self, episode_id: str, key: str) -> EpisodeView:
        """Extends the lease. The state in the answer says whether the episode continues."""
        view = await self.episodes.heartbeat(episode_id, key)
        self._saw(view.client_id)
        return view

    def agree(self, client_id: str) -> None:
        """Records that this client asks for a weight update with the episodes that have ended."""
        self._saw(client_id)
        self._agreed.add(client_id)
        self._count_agreement()
        self._notify()

    # The trainer.

    async def begin(self) -> str:
        """To be called before a trainer starts. Returns the run folder to resume; empty: a new run.

        Raises `state` if an engine is already running or starting.
        """
        if self.state.has_engine:
            raise SwarmError(f"the engine is {self.state.value}: stop it first", "state")
        before, detail = self.state, self._status.detail
        self.set_state(EngineState.BOOTING)  # before anything is awaited: one start at a time
        try:
            await self._return_batch()
            await self.episodes.abandon("its trainer has ended")
            self.episodes.generation += 1
            await self._table.remember("generation", str(self.episodes.generation))
            await self._table.remember("engine", _RUNS)
            return await self._table.recall("run_dir") or ""
        except SwarmError:
            self.set_state(before, detail)
            raise

    async def set_run_dir(self, path: str) -> None:
        """Sets the run folder that the next trainer resumes; empty: it begins a new run."""
        await self._table.remember("run_dir", path)

    async def hello(self, hello: TrainerHello, proxy: Proxy) -> int:
        """To be called when the trainer is up, with its proxy and its plan. Returns its
        generation."""
        self.episodes.connect(hello, proxy)
        await self.set_run_dir(hello.run_dir)
        return self.episodes.generation

    async def next_batch(self, version: int, wait_s: float) -> BatchView | None:
        """Marks the last batch as trained. Returns the next batch, or None after `wait_s`.

        Raises `state` when the trainer that asked has ended, or has asked again.
        """
        request = self._request = object()
        await self.trained(self._status.batch)
        self._require_current(request)
        self._status.version = self.episodes.version = version
        if self.state in (EngineState.BOOTING, EngineState.SYNCING):
            self.set_state(EngineState.ROLLING)
        try:
            async with asyncio.timeout(wait_s):
                while not self._may_hand_over:
                    await self._changed.wait()
                    self._require_current(request)
        except TimeoutError:
            return None
        async with self._batching:
            self._require_current(request)
            selection = self.episodes.collected.select() if self._may_hand_over else None
            return None if selection is None else await self._hand_over(selection)

    async def trained(self, batch: int) -> None:
        """Marks the batch as trained: the trainer's weights or its last checkpoint include it."""
        async with self._batching:
            if self._batched and batch == self._status.batch:
                await self.episodes.move(self._batched, EpisodeState.TRAINED)
                self._table.remove_records(self._batched)
                self._batched = []

    async def trainer_ended(self, state: EngineState, detail: str) -> None:
        """To be called when the trainer has ended, and with it its proxy and engine. Aborts open
        episodes and keeps ended ones."""
        self._request = None
        why = f"the trainer ended: {detail}" if detail else "the engine was stopped"
        self.episodes.admission.close_engine(why)
        try:
            await self._return_batch()
            await self.episodes.abandon(why)
            await self._table.remember("engine", state.value)
        except SwarmError as error:  # `begin` tries again, and a restarted server does the same
            _log.error("cannot record the trainer's end: %s", error.message)
        self.episodes.disconnect()
        self._drain_until = None
        self.set_state(state, detail)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _reap(self) -> None:
        """Reclaims episodes and drains the batch, after each change and at each deadline."""
        while True:
            changed = self._changed
            try:
                next_look = await self._look()
            except SwarmError as error:
                _log.error("cannot reclaim episodes: %s", error.message)
                next_look = time.monotonic() + DISK_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_look - time.monotonic())):
                    await changed.wait()

    async def _look(self) -> float:
        """Reclaims and drains once. Returns when to look again, on the monotonic clock."""
        async with self._batching:
            await self._drop(
                self.episodes.collected.without_signal(), "all rewards of its group are equal"
            )
        self._forget_absent_clients()
        self._warn()
        self._drain()
        if self._drain_until is not None and self._drain_until <= time.monotonic():
            self._drain_until = None
            reason = "its batch was full, and drain_timeout_s passed before it ended"
            await self.episodes.abandon(reason, kind="train")
        expires = await self.episodes.expire()
        return expires if self._drain_until is None else min(expires, self._drain_until)

    def _warn(self) -> None:
        """Logs the warning once each time that the number of ended episodes reaches its share."""
        warning = self.episodes.collected.warning
        if warning and not self._has_warned:
            _log.warning("%s", warning)
        self._has_warned = bool(warning)

    def _refused(self, reason: str) -> SwarmError:
        is_rolling = self.state is EngineState.ROLLING
        return SwarmError(reason, "throttled" if is_rolling else "state")

    @property
    def _may_hand_over(self) -> bool:
        if self.state not in (EngineState.ROLLING, EngineState.DRAINING):
            return False
        carries = self.episodes.plan.swarm.left_over == "carry"
        nobody_open = not self.episodes.admission.claimed_training
        return self.episodes.collected.is_full and (carries or nobody_open)

    def _drain(self) -> None:
        """Starts to drain if the batch is full and waits for open episodes. Stops it if the batch
        is not full any more: another client has joined `all_clients`."""
        rules = self.episodes.plan.swarm
        is_full = self.episodes.collected.is_full
        if self.state is EngineState.ROLLING and is_full and rules.left_over != "carry":
            self._drain_until = time.monotonic() + rules.drain_timeout_s
            self.set_state(EngineState.DRAINING)
        elif self.state is EngineState.DRAINING and not is_full:
            self._drain_until = None
            self.set_state(EngineState.ROLLING)

    async def _hand_over(self, selection: Selection) -> BatchView:
        number, before = self._status.batch + 1, self.state
        batch = [episode for group in selection.groups for episode in group]
        self.set_state(EngineState.SYNCING)  # places that become free are for the next version
        try:
            await self._table.remember("batch", str(number))
            await self.episodes.move(batch, EpisodeState.BATCHED, batch=number)
            self._status.batch, self._batched, self._drain_until = number, batch, None
            if self.episodes.plan.swarm.left_over == "drop":
                await self._drop(selection.left, f"left over from batch {number}")
        except SwarmError:
            if self._status.batch != number:
                self.set_state(before)
            raise
        self._agreed.clear()
        self._count_agreement()
        self._status.mean_reward = fmean(episode.view.reward or 0.0 for episode in batch)
        self._notify()
        groups = [[episode.view for episode in group] for group in selection.groups]
        return BatchView(number=number, groups=groups)

    async def _return_batch(self) -> None:
        """Makes the episodes of an untrained batch wait again, before all others."""
        async with self._batching:
            again, self._batched = self._batched, []
            if not again:
                return
            try:
                await self.episodes.move(again, EpisodeState.ENDED, batch=None)
            except SwarmError:
                self._batched = again
                raise
            returned = {episode.episode_id for episode in again}
            others = [e for e in self.episodes.collected if e.episode_id not in returned]
            self.episodes.collect_again([*again, *others], self.episodes.plan)

    def _require_current(self, request: object) -> None:
        if self._request is not request:
            raise SwarmError("this trainer has ended, or has asked again", "state")

    async def _drop(self, episodes: Sequence[Episode], reason: str) -> None:
        if episodes:
            await self.episodes.move(episodes, EpisodeState.DROPPED, reason=reason)
            self._table.remove_records(episodes)

    def _saw(self, client_id: str) -> None:
        self._clients.pop(client_id, None)
        self._clients[client_id] = time.monotonic()
        if len(self._clients) > MAX_CLIENTS:
            self._forget(next(iter(self._clients)))
        self._count_agreement()

    def _forget_absent_clients(self) -> None:
        oldest = time.monotonic() - CLIENT_MEMORY_S
        while self._clients and next(iter(self._clients.values())) < oldest:
            self._forget(next(iter(self._clients)))
        self._count_agreement()

    def _forget(self, client_id: str) -> None:
        del self._clients[client_id]
        self._agreed.discard(client_id)

    def _count_agreement(self) -> None:
        """`_agreed` holds only clients that are present."""
        rule = self.episodes.plan.swarm.stop_rule
        everyone = bool(self._clients) and len(self._agreed) == len(self._clients)
        is_agreed = everyone if rule == "all_clients" else bool(self._agreed)
        if is_agreed != self.episodes.collected.is_agreed:
            self.episodes.collected.is_agreed = is_agreed
            self._notify()
        self.episodes.admission.look_at_batch()

    def _snapshot(self) -> Status:
        collected = self.episodes.collected
        return self._status.model_copy(
            update={
                "change": self._changes,
                "counts": dict(self._table.counts),
                "open_episodes": len(self.episodes),
                "collected": len(collected),
                "groups_ready": collected.groups_ready,
                "groups_wanted": self.episodes.plan.rollout.groups_per_step,
                "clients": sorted(self._clients),
                "agreed": sorted(self._agreed),
                "warning": collected.warning,
            }
        )


def _as_found(recorded: str | None) -> tuple[EngineState, str]:
    """The engine's state after a restart of the server, and what to say of it."""
    if recorded == _RUNS:
        why = "the swarm server was killed while its trainer ran; start the engine to resume"
        return EngineState.INTERRUPTED, why
    if recorded == EngineState.DONE:
        return EngineState.DONE, "the training is done"
    if recorded == EngineState.ERROR:
        return EngineState.ERROR, "the trainer had failed before the server was restarted"
    return EngineState.OFFLINE, ""
