"""An episode: one object from its claim to its end.

    claimed ──▶ prepared ──▶ ended ──▶ batched ──▶ trained
       │           │           │          └──▶ ended      the trainer ended before it trained
       │           │           └──▶ dropped               outside the batch, not kept
       ├───────────┴──▶ evaluated                         the end of an evaluation episode
       └───────────┴──▶ aborted, expired                  never counted

`prepared` is used only by episodes that end together with episodes of other servers. Invariant: an
episode changes its state only along these arrows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.extras.swarm.wire import Decider, EpisodeState, EpisodeView

OPEN = frozenset({EpisodeState.CLAIMED, EpisodeState.PREPARED})
ALIVE = OPEN | {EpisodeState.ENDED}
"""States that use up the quotas of an episode's task and source."""
RECLAIMED = frozenset({EpisodeState.ABORTED, EpisodeState.EXPIRED})

_CLOSED = frozenset({EpisodeState.ENDED, EpisodeState.EVALUATED}) | RECLAIMED
_NEXT: Mapping[EpisodeState, frozenset[EpisodeState]] = {
    EpisodeState.CLAIMED: _CLOSED | {EpisodeState.PREPARED},
    EpisodeState.PREPARED: _CLOSED,
    EpisodeState.ENDED: frozenset({EpisodeState.BATCHED, EpisodeState.DROPPED}),
    EpisodeState.BATCHED: frozenset({EpisodeState.TRAINED, EpisodeState.ENDED}),
}


class EpisodeStateError(Exception):
    """A bug in this package: an episode was moved between states that no arrow connects."""


@dataclass(slots=True, eq=False)
class Episode:
    """What the server knows about an episode. Times are on the monotonic clock, so that a change of
    the wall clock reclaims nothing.

    Example: Episode(view, key_hash, lease_s=60.0, lease_until=now + 60.0, ends_at=now + 3600.0)
    """

    view: EpisodeView
    key_hash: bytes
    """SHA-256 of the claim's key."""
    decider: Decider | None = None
    """The episode on another server that decides about this prepared one."""
    lease_s: float = 0.0
    lease_until: float = math.inf
    ends_at: float = math.inf
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an end, an abort or an expiry is being carried out."""

    @property
    def episode_id(self) -> str:
        return self.view.episode_id

    @property
    def state(self) -> EpisodeState:
        return self.view.state

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_prepared(self) -> bool:
        return self.state is EpisodeState.PREPARED

    @property
    def is_training(self) -> bool:
        return self.view.kind == "train"

    @property
    def deadline(self) -> float:
        """When the episode is reclaimed. A prepared episode has no lifetime, only a lease."""
        return self.lease_until if self.is_prepared else min(self.lease_until, self.ends_at)

    def extend_lease(self, now: float) -> None:
        self.lease_until = now + self.lease_s

    def moved(self, state: EpisodeState, **changes: Any) -> EpisodeView:
        """The view that the episode has in `state`; the episode itself stays as it is."""
        if state not in _NEXT.get(self.state, ()):
            raise EpisodeStateError(f"{self.episode_id}: {self.state.value} → {state.value}")
        return self.view.model_copy(update={"state": state, **changes})
