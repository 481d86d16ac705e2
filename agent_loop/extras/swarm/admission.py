"""Decides which claims get an episode now, and in which order the others wait.

A claim that cannot be served waits at the first gate that is closed for it: the engine, a full
batch, `max_open`, `max_collected`, its task's group or its source's share. Invariant: when a place
becomes free, only the claims at the gates that this opens are looked at, and each of them once. The
cost of a change is therefore independent of the number of open episodes and of the claims that wait
at other gates. Within a gate, claims are served in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agent_loop.extras.swarm.batching import Collected
from agent_loop.extras.swarm.config import BatchPlan
from agent_loop.extras.swarm.episode import ALIVE, Episode
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import Claim, EpisodeState, EpisodeView

Gate = tuple[str, str]
ENGINE: Gate = ("engine", "")
BATCH: Gate = ("batch", "")
MAX_OPEN: Gate = ("max_open", "")
MAX_COLLECTED: Gate = ("max_collected", "")
MAX_WAITING = 10_000
"""Number of claims that may wait. Each holds a connection, with 16 kB; more are refused at
once."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a claim has to wait, and at which gate."""

    gate: Gate
    reason: str


@dataclass(slots=True, eq=False)
class _Waiting:
    claim: Claim
    gate: Gate
    episode: asyncio.Future[Episode] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    """Example: episode = await admission.enter(claim, refused=lambda reason: SwarmError(…))"""

    def __init__(
        self,
        collected: Collected,
        make_episode: Callable[[Claim], Episode],
        take_back: Callable[[Episode], None],
    ) -> None:
        """`make_episode` makes the episode of a claim that is served, `take_back` removes and
        discards one whose claimant has gone; both must not block."""
        self._collected = collected
        self._make_episode = make_episode
        self._take_back = take_back
        self._closed = "the engine is offline"
        self._open = 0
        self.claimed_training = 0
        """Number of claimed, not yet prepared, training episodes."""
        self._tasks: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._waiting: dict[Gate, OrderedDict[_Waiting, None]] = {}

    @property
    def waiting(self) -> int:
        """Number of claims that wait."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, claim: Claim, refused: Callable[[str], SwarmError]) -> Episode:
        """Waits for the claim's episode, for at most `claim.wait_s`.

        After that, raises the error that `refused` returns for the reason why the claim waits.
        """
        blocked = self.blocked(claim)
        if blocked is None:
            return self._serve(claim)
        if self.waiting >= MAX_WAITING:
            raise refused(f"{blocked.reason}, and {self.waiting} claims wait already")
        waiting = _Waiting(claim, blocked.gate)
        self._wait_at(blocked.gate, waiting)
        try:
            await asyncio.wait([waiting.episode], timeout=claim.wait_s)
        except asyncio.CancelledError:
            if waiting.episode.done() and waiting.episode.exception() is None:
                self._take_back(waiting.episode.result())
            raise
        finally:
            self._leave(waiting)
        if waiting.episode.done():
            return waiting.episode.result()
        blocked = self.blocked(claim)
        raise refused("another claim was served first" if blocked is None else blocked.reason)

    def blocked(self, claim: Claim) -> Blocked | None:
        """Why the claim cannot be served now; None: it can be served."""
        rules = self._plan.swarm
        if self._closed:
            return Blocked(ENGINE, self._closed)
        if claim.kind == "train" and self._collected.is_full:
            return Blocked(BATCH, "the batch is full")
        if self._open >= rules.max_open:
            reason = f"{self._open} episodes are open, swarm.max_open is {rules.max_open}"
            return Blocked(MAX_OPEN, reason)
        if claim.kind == "eval":
            return None
        if len(self._collected) >= rules.max_collected:
            reason = f"{len(self._collected)} episodes wait for a batch, swarm.max_collected is "
            return Blocked(MAX_COLLECTED, f"{reason}{rules.max_collected}")
        return self._blocked_by_quota(claim)

    def open_engine(self) -> None:
        self._closed = ""
        self.look_at([ENGINE])

    def close_engine(self, reason: str) -> None:
        """Claims wait until `open_engine`."""
        self._closed = reason

    def refuse_all(self, error: SwarmError) -> None:
        """Ends every wait with `error`, because there is no engine to wait for."""
        for line in self._waiting.values():
            for waiting in line:
                if not waiting.episode.done():
                    waiting.episode.set_exception(error)
        self._waiting.clear()

    def replace(self, collected: Collected) -> None:
        """Uses `collected` and its plan from now on. Every waiting claim is looked at again."""
        self._collected = collected
        self.look_at(list(self._waiting))

    def add(self, view: EpisodeView) -> None:
        """Counts a new episode."""
        self._count(view, 1)

    def discard(self, view: EpisodeView) -> None:
        """Removes an episode that was counted and could not be made."""
        self._count(view, -1)
        self.look_at(_gates(view))

    def moved(self, before: EpisodeView, after: EpisodeView) -> None:
        """Counts the change of an episode's state or task. `look_at_freed` then serves claims."""
        self._count(before, -1)
        self._count(after, 1)

    def look_at_freed(self, views: Iterable[EpisodeView]) -> None:
        """Serves claims with the places that these former views of moved episodes had."""
        self.look_at(dict.fromkeys(gate for view in views for gate in _gates(view)))

    def look_at_batch(self) -> None:
        """Serves the claims that a full batch kept waiting, if it is no longer full."""
        self.look_at([BATCH])

    def look_at(self, gates: Iterable[Gate]) -> None:
        """Serves the claims at these gates, as far as the gates are open."""
        for gate in gates:
            line = self._waiting.get(gate, OrderedDict())
            while line:
                waiting = next(iter(line))
                blocked = self.blocked(waiting.claim)
                if blocked is not None and blocked.gate == gate:
                    break
                self._leave(waiting)
                if blocked is None:
                    waiting.episode.set_result(self._serve(waiting.claim))
                else:
                    self._wait_at(blocked.gate, waiting)

    @property
    def _plan(self) -> BatchPlan:
        return self._collected.plan

    def _blocked_by_quota(self, claim: Claim) -> Blocked | None:
        if claim.task_id is not None:
            same, size = self._tasks[claim.task_id], self._plan.rollout.group_size
            if same >= size:
                reason = f"task {claim.task_id!r} has {same} episodes, rollout.group_size is {size}"
                return Blocked(("task", claim.task_id), reason)
        if self._plan.swarm.mix:
            same, quota = self._sources[claim.source], source_quota(claim.source, self._plan)
            if same >= quota:
                reason = f"source {claim.source!r} has {same} episodes, its share of a batch is "
                return Blocked(("source", claim.source), f"{reason}{quota}")
        return None

    def _serve(self, claim: Claim) -> Episode:
        episode = self._make_episode(claim)
        self.add(episode.view)
        return episode

    def _wait_at(self, gate: Gate, waiting: _Waiting) -> None:
        waiting.gate = gate
        self._waiting.setdefault(gate, OrderedDict())[waiting] = None

    def _leave(self, waiting: _Waiting) -> None:
        line = self._waiting.get(waiting.gate)
        if line is None:
            return
        line.pop(waiting, None)
        if not line:
            del self._waiting[waiting.gate]

    def _count(self, view: EpisodeView, step: int) -> None:
        if view.state in (EpisodeState.CLAIMED, EpisodeState.PREPARED):
            self._open += step
        if view.kind != "train" or view.state not in ALIVE:
            return
        if view.state is EpisodeState.CLAIMED:
            self.claimed_training += step
        for counter, key in ((self._tasks, view.task_id), (self._sources, view.source)):
            if key is not None:
                counter[key] += step
                if not counter[key]:
                    del counter[key]


def source_quota(source: str, plan: BatchPlan) -> int:
    """Number of episodes of a batch that `swarm.mix` allows this source."""
    mix = plan.swarm.mix
    return math.ceil(mix.get(source, 0.0) / sum(mix.values()) * plan.episodes)


def _gates(view: EpisodeView) -> list[Gate]:
    """The gates that an episode may have kept closed."""
    gates = [MAX_OPEN, BATCH, MAX_COLLECTED, ("source", view.source)]
    if view.task_id is not None:
        gates.append(("task", view.task_id))
    return gates
