"""The swarm: the engine's state, who may claim, and what becomes a batch.

Invariant: a batch is handed over once it is marked on disk, to the trainer that is there now, and
trained when that one asks for the next or says so; where it ends before that, the batch's episodes
wait for the next batch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from agent_loop.swarm.batching import (
    Selection,
    SwarmSettings,
    groups_ready,
    refusal,
    select,
    without_signal,
)
from agent_loop.swarm.changes import Changes
from agent_loop.swarm.episodes import Episodes
from agent_loop.swarm.errors import SwarmError
from agent_loop.swarm.table import EpisodeTable
from agent_loop.swarm.wire import (
    BatchView,
    Claim,
    Claimed,
    EngineState,
    EpisodeState,
    EpisodeView,
    Status,
)

CLIENT_MEMORY_S = 600.0
"""A client that did nothing for so long is not waited for by `all_clients`."""
DISK_RETRY_S = 5.0
"""Until leases are looked at again after the disk refused a write."""

_log = logging.getLogger(__name__)


class Swarm:
    def __init__(self, settings: SwarmSettings, table: EpisodeTable, records: Path) -> None:
        self.settings = settings
        self._table = table
        self._changes = Changes()
        self.episodes = Episodes(settings, table, records, self._changes)
        self._batched: list[EpisodeView] = []
        self._clients: dict[str, float] = {}
        self._agreed: set[str] = set()
        self._status = Status(state=EngineState.OFFLINE)
        self._drain_until: float | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._asking: object | None = None
        """The call that the next batch is for."""
        self._batching = asyncio.Lock()

    async def open(self) -> None:
        """Takes up what is on disk. Claims of the last server are over: their proxy is."""
        claimed = await self._table.in_state(EpisodeState.CLAIMED)
        reason = "the swarm server was restarted"
        await self._table.change(claimed, state=EpisodeState.ABORTED, reason=reason)
        again = await self._table.in_state(EpisodeState.BATCHED)
        # The trainer never said that it trained on them.
        await self._table.change(again, state=EpisodeState.ENDED, batch=None)
        for view in await self._table.in_state(EpisodeState.PREPARED):
            await self.episodes.take_up(view)
        self.episodes.ended = await self._table.in_state(EpisodeState.ENDED)
        self._status.batch = int(await self._table.recall("batch") or 0)
        self.episodes.generation = int(await self._table.recall("generation") or 0)
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

    async def configure(self, settings: SwarmSettings) -> None:
        """The engine is about to start, with these settings."""
        self.settings = self.episodes.settings = settings
        self.episodes.generation += 1
        await self._table.remember("generation", str(self.episodes.generation))

    async def run_dir(self) -> str:
        """Where the last trainer's run can go on from; empty: nowhere."""
        return await self._table.recall("run_dir") or ""

    async def set_run_dir(self, path: str) -> None:
        await self._table.remember("run_dir", path)

    def set_state(self, state: EngineState, detail: str = "") -> None:
        self._status.state, self._status.detail = state, detail
        self._changes.notify()

    async def status(self, *, since: int | None = None, wait_s: float = 0.0) -> Status:
        """Now, or once the change number passes `since`."""
        try:
            async with asyncio.timeout(wait_s):
                while since is not None and self._changes.count <= since:
                    await self._changes.wait()
        except TimeoutError:
            pass
        return await self._snapshot()

    def buffer(self, limit: int) -> list[EpisodeView]:
        """Episodes that are open, ended or in the present batch."""
        waiting = [*self.episodes.open_views, *self.episodes.prepared_views]
        return [*waiting, *self.episodes.ended, *self._batched][:limit]

    # Clients.

    async def claim(self, wanted: Claim) -> Claimed:
        """Raises `throttled` or `state` when there is nothing to claim for `wait_s`, and `state` at
        once where no engine is on its way."""
        self._seen(wanted.client_id)
        try:
            async with asyncio.timeout(wanted.wait_s):
                while self._refusal(wanted) is not None:
                    if self.state in (EngineState.OFFLINE, EngineState.ERROR):
                        raise self._refused(wanted)
                    await self._changes.wait()
        except TimeoutError:
            raise self._refused(wanted) from None
        return await self.episodes.claim(wanted, self._status.version)

    async def heartbeat(self, episode_id: str, key: str) -> EpisodeView:
        """Extends the lease. What is returned says whether the episode goes on."""
        view = await self.episodes.heartbeat(episode_id, key)
        self._seen(view.client_id)
        return view

    def agree(self, client_id: str) -> None:
        """This client wants the weights updated with what there is."""
        self._seen(client_id)
        self._agreed.add(client_id)
        self._changes.notify()

    # The trainer.

    async def next_batch(self, version: int, wait_s: float) -> BatchView | None:
        """The last batch is trained; the next one, or None after `wait_s`. Raises `state` when the
        trainer that asked is gone, or asks again."""
        asking = self._asking = object()
        await self.trained(self._status.batch)
        self._status.version = version
        if self.state in (EngineState.BOOTING, EngineState.SYNCING):
            self.set_state(EngineState.ROLLING)
        self._changes.notify()
        try:
            async with asyncio.timeout(wait_s):
                while self._selection() is None:
                    await self._changes.wait()
                    self._still(asking)
        except TimeoutError:
            return None
        async with self._batching:
            self._still(asking)
            selection = self._selection()
            return await self._hand_over(selection) if selection else None

    async def trained(self, batch: int) -> None:
        """The trainer's checkpoint, or its weights, have this batch in them."""
        async with self._batching:
            if self._batched and batch == self._status.batch:
                await self._table.change(self._batched, state=EpisodeState.TRAINED)
                self._remove_records(self._batched)
                self._batched = []

    async def trainer_ended(self, state: EngineState, detail: str) -> None:
        """Its proxy and engine are gone: so are the open episodes. What ended is kept."""
        self._asking = None
        async with self._batching:
            again, self._batched = self._batched, []
            for view in again:
                view.state, view.batch = EpisodeState.ENDED, None
            self.episodes.ended = [*again, *self.episodes.ended]
        try:
            await self._table.update(again)
            why = f"the trainer ended: {detail}" if detail else "the engine was stopped"
            await self.episodes.abandon(why)
        except SwarmError as error:  # what is on disk means the same: `open` takes it up so
            _log.error("the trainer's end is not on disk: %s", error.message)
        self.episodes.connect(None, None)
        self.set_state(state, detail)

    # Inside.

    async def _reap(self) -> None:
        """Reclaims and drains, woken by changes and deadlines."""
        while True:
            try:
                next_look = await self._look()
            except SwarmError as error:
                _log.error("leases are not looked at: %s", error.message)
                next_look = time.monotonic() + DISK_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_look - time.monotonic())):
                    await self._changes.wait()

    async def _look(self) -> float:
        """When to look again, by the monotonic clock."""
        if hopeless := without_signal(self.episodes.ended, self.settings):
            await self._drop(hopeless, "the rewards of its whole group are equal")
            self._changes.notify()
        self._drain()
        if self._drain_until is not None and self._drain_until <= time.monotonic():
            self._drain_until = None
            reason = "its batch was full, and it took too long to end"
            await self.episodes.abandon(reason, kind="train")
        deadlines = [await self.episodes.expire(), self._drain_until]
        return min((at for at in deadlines if at is not None), default=time.monotonic() + 3600)

    def _refusal(self, wanted: Claim) -> str | None:
        if self.state is not EngineState.ROLLING or not self.episodes.have_proxy:
            return f"the engine is {self.state.value}"
        open_ = self.episodes.open_views
        if wanted.kind == "eval":
            full = len(open_) >= self.settings.max_open
            return f"{len(open_)} episodes are open" if full else None
        if self._status_selection() is not None:
            return "the batch is full"
        return refusal(
            task_id=wanted.task_id,
            source=wanted.source,
            open_=[*open_, *self.episodes.prepared_views],
            ended=self.episodes.ended,
            settings=self.settings,
        )

    def _refused(self, wanted: Claim) -> SwarmError:
        why = self._refusal(wanted) or "somebody else was faster"
        throttled = self.state is EngineState.ROLLING
        return SwarmError(why, "throttled" if throttled else "state")

    def _status_selection(self) -> Selection | None:
        return select(
            self.episodes.ended,
            self.settings,
            clients=self._present(),
            agreed=frozenset(self._agreed),
        )

    def _selection(self) -> Selection | None:
        """The batch, once it may be handed over."""
        if self.state not in (EngineState.ROLLING, EngineState.DRAINING):
            return None
        selection = self._status_selection()
        training = any(view.kind == "train" for view in self.episodes.open_views)
        if selection and self.settings.left_over != "carry" and training:
            return None
        return selection

    def _drain(self) -> None:
        """Begins to drain where the batch is full and open episodes are waited for."""
        full = self._status_selection() is not None
        if self.state is EngineState.ROLLING and full and self.settings.left_over != "carry":
            self._drain_until = time.monotonic() + self.settings.drain_timeout_s
            self.set_state(EngineState.DRAINING)

    async def _hand_over(self, selection: Selection) -> BatchView:
        number = self._status.batch + 1
        batch = [view for group in selection.groups for view in group]
        await self._table.remember("batch", str(number))
        await self._table.change(batch, state=EpisodeState.BATCHED, batch=number)
        self._forget(batch)
        self._batched, self._drain_until = batch, None
        if self.settings.left_over == "drop":
            await self._drop(selection.left, f"left over from batch {number}")
        self._agreed.clear()
        self._status.batch = number
        self._status.mean_reward = fmean(view.reward or 0.0 for view in batch)
        self.set_state(EngineState.SYNCING)
        return BatchView(number=number, groups=selection.groups)

    def _still(self, asking: object) -> None:
        if self._asking is not asking:
            raise SwarmError("this trainer has ended, or asked again", "state")

    async def _drop(self, views: Sequence[EpisodeView], reason: str) -> None:
        await self._table.change(views, state=EpisodeState.DROPPED, reason=reason)
        self._forget(views)
        self._remove_records(views)

    def _forget(self, views: Sequence[EpisodeView]) -> None:
        """They do not wait for a batch any more."""
        gone = {view.episode_id for view in views}
        self.episodes.ended = [view for view in self.episodes.ended if view.episode_id not in gone]

    def _remove_records(self, views: Sequence[EpisodeView]) -> None:
        for view in views:
            self.episodes.record_file(view.episode_id).unlink(missing_ok=True)

    def _seen(self, client_id: str) -> None:
        self._clients[client_id] = time.monotonic()

    def _present(self) -> frozenset[str]:
        oldest = time.monotonic() - CLIENT_MEMORY_S
        self._clients = {client: at for client, at in self._clients.items() if at >= oldest}
        return frozenset(self._clients)

    async def _snapshot(self) -> Status:
        return self._status.model_copy(
            update={
                "change": self._changes.count,
                "counts": await self._table.counts(),
                "open_episodes": len(self.episodes),
                "collected": len(self.episodes.ended),
                "groups_ready": groups_ready(self.episodes.ended, self.settings),
                "groups_wanted": self.settings.groups,
                "clients": sorted(self._present()),
                "agreed": sorted(self._agreed),
            }
        )
