"""What goes between swarm clients, the server and the trainer. Times are Unix seconds.

engine    offline → booting → rolling → (draining →) syncing → rolling …; error from any
episode   claimed → (prepared →) ended → batched → trained; or aborted, expired, dropped, evaluated
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

EpisodeKind = Literal["train", "eval"]


class EngineState(StrEnum):
    OFFLINE = "offline"
    BOOTING = "booting"
    ROLLING = "rolling"
    """Episodes can be claimed."""
    DRAINING = "draining"
    """The stop rule is met: nothing new, claimed episodes may end."""
    SYNCING = "syncing"
    """A batch is trained and the weights are sent. Claimed episodes go on."""
    ERROR = "error"
    """The trainer ended by itself; `detail` says why. `start` begins anew."""


class EpisodeState(StrEnum):
    CLAIMED = "claimed"
    PREPARED = "prepared"
    """Its end is on disk, and counts once the episodes that it is one with end too."""
    ENDED = "ended"
    """Rewarded and on disk."""
    BATCHED = "batched"
    """Given to the trainer, which has not said that it trained on it."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    ABORTED = "aborted"
    """By its client, or by us because it could not go on."""
    EXPIRED = "expired"
    """Its lease or lifetime ran out."""
    DROPPED = "dropped"
    """Ended, and left over from a batch where left-overs are not kept."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Claim(_Request):
    client_id: str = Field(min_length=1, max_length=200)
    kind: EpisodeKind = "train"
    task_id: str | None = None
    """Known beforehand: no more episodes of a task are given out than its group takes."""
    source: str = "default"
    """For the server's task mix."""
    lease_s: float | None = Field(None, gt=0)
    """Reclaimed when no heartbeat came for so long; None: the server's default."""
    wait_s: float = Field(30.0, ge=0, le=300)


class Claimed(BaseModel):
    """An episode as its claimant has it. `key` proves that it is the claimant."""

    episode_id: str
    key: str
    api_key: str
    base_url: str
    """With `/v1`."""
    anthropic_base_url: str
    kind: EpisodeKind
    task_id: str | None
    lease_s: float
    ends_at: float
    """Reclaimed then, heartbeats or not."""
    version: int
    """Of the policy when it was claimed."""


class End(_Request):
    """The reward of an episode. Sent again: the same answer, or `conflict` if it differs."""

    task_id: str = Field(min_length=1, max_length=500)
    """Episodes of one task share a baseline."""
    reward: FiniteFloat
    reward_parts: dict[str, FiniteFloat] = Field(default_factory=dict)
    turn_rewards: dict[NonNegativeInt, FiniteFloat] = Field(default_factory=dict)
    """Beside the reward: number of a model call, from 0 → a reward of its own."""
    metadata: dict[str, Any] = Field(default_factory=dict)


class Decider(_Request):
    """The episode, on another server, that a prepared one ends with."""

    url: str = Field(pattern=r"^https?://", max_length=2000)
    episode_id: str = Field(min_length=1, max_length=200)
    key: str = Field(min_length=1, max_length=200)
    """Its claim's key: allows to ask what became of it."""


class Prepare(_Request):
    """An end that is not to count yet; without `decider` this is the episode that decides."""

    end: End
    decider: Decider | None = None


class Outcome(BaseModel):
    state: EpisodeState


class Agree(_Request):
    client_id: str = Field(min_length=1, max_length=200)


class EpisodeView(BaseModel):
    """What everybody may know of an episode."""

    episode_id: str
    client_id: str
    kind: EpisodeKind
    state: EpisodeState
    task_id: str | None = None
    source: str = "default"
    reward: float | None = None
    reward_parts: dict[str, float] = Field(default_factory=dict)
    turn_rewards: dict[int, float] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    reason: str | None = None
    """Why it was aborted, expired or dropped."""
    version: int = 0
    generation: int = 0
    """Which start of the trainer sampled it: another one's versions are other weights."""
    claimed_at: float = 0.0
    ended_at: float | None = None
    batch: int | None = None


class Status(BaseModel):
    """`change` grows with every change of anything: ask with `since` to wait for the next."""

    state: EngineState
    detail: str = ""
    change: int = 0
    version: int = 0
    batch: int = 0
    """Batches given to the trainer so far."""
    open_episodes: int = 0
    collected: int = 0
    """Ended, for the next batch."""
    groups_ready: int = 0
    groups_wanted: int = 0
    clients: list[str] = Field(default_factory=list)
    agreed: list[str] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    """Episodes by state, since the server's first start."""
    mean_reward: float | None = None
    """Of the last batch."""


class TrainerHello(_Request):
    """The trainer is up: from now on episodes get sessions of this proxy."""

    proxy_url: str
    proxy_admin_key: str
    sampling: dict[str, Any]
    """Pinned in training episodes."""
    session_limits: dict[str, Any] = Field(default_factory=dict)
    profile: str = "default"
    run_dir: str = ""
    """Where it can go on from, when it is started again; empty: nowhere."""


class Welcome(BaseModel):
    generation: int


class TrainerReady(_Request):
    """The trainer wants its next batch; what it had before is trained."""

    version: int
    wait_s: float = Field(30.0, ge=0, le=300)


class Trained(_Request):
    """A checkpoint has this batch in it, and the trainer ends."""

    batch: int


class BatchView(BaseModel):
    number: int
    groups: list[list[EpisodeView]]
