"""The messages between swarm clients, the server and the trainer. Times are Unix seconds.

`swarm.py` has the states of the engine, `episode.py` those of an episode.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, field_validator
from pydantic_core import to_json

from agent_loop.extras.swarm.config import SwarmConfig
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.reward_values import REWARD_LIMIT

EpisodeKind = Literal["train", "eval"]
MAX_REPORT_BYTES = 65_536
"""Maximum size of what a client adds to an episode's end. The server keeps it in memory until the
episode is trained: 0.25 GB with the default `swarm.max_collected`."""


class EngineState(StrEnum):
    """The state of the engine, that is, of the trainer with its proxy."""

    OFFLINE = "offline"
    """It was never started, or it was stopped before its training was done."""
    INTERRUPTED = "interrupted"
    """The server was killed while the trainer ran. A start resumes the run."""
    DONE = "done"
    """The training is done. A start begins a new run."""
    BOOTING = "booting"
    ROLLING = "rolling"
    """Episodes can be claimed."""
    DRAINING = "draining"
    """The batch is full: no episodes are given out, and claimed episodes may still end."""
    SYNCING = "syncing"
    """A batch is trained and the weights are sent. Claimed episodes continue."""
    ERROR = "error"
    """The trainer ended by itself; `detail` says why. It can be started again."""

    @property
    def has_engine(self) -> bool:
        """Whether a trainer runs or starts."""
        return self not in ("offline", "interrupted", "done", "error")


class EpisodeState(StrEnum):
    """The state of an episode."""

    CLAIMED = "claimed"
    PREPARED = "prepared"
    """Its end is on disk, and counts once the other servers' episodes end too."""
    ENDED = "ended"
    """The episode has its reward and is on disk."""
    BATCHED = "batched"
    """Handed to the trainer, which has not yet reported it as trained."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    ABORTED = "aborted"
    """Aborted by its client, or by the server because the episode could not continue."""
    EXPIRED = "expired"
    """Its lease or lifetime ran out."""
    DROPPED = "dropped"
    """Ended, but not part of a batch, and discarded by `left_over`."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Claim(_Request):
    """A client asks for an episode."""

    client_id: str = Field(min_length=1, max_length=200)
    kind: EpisodeKind = "train"
    task_id: str | None = Field(None, max_length=500)
    """The task's id; if given, at most one group of the task's episodes is given out."""
    source: str = Field("default", max_length=500)
    """The source of the task, for `swarm.mix`."""
    lease_s: float | None = Field(None, gt=0)
    """Seconds without a heartbeat after which it is reclaimed; None: `swarm.lease_s`."""
    wait_s: float = Field(30.0, ge=0, le=300)


class Claimed(BaseModel):
    """An episode as its claimant receives it. `key` proves who the claimant is."""

    episode_id: str
    key: str
    api_key: str
    base_url: str
    """URL of the episode's session, with `/v1`."""
    anthropic_base_url: str
    kind: EpisodeKind
    task_id: str | None
    lease_s: float
    ends_at: float
    """When the episode is reclaimed, with or without heartbeats (Unix seconds)."""
    version: int
    """The policy's version when the episode was claimed."""


RewardValue = Annotated[FiniteFloat, Field(ge=-REWARD_LIMIT, le=REWARD_LIMIT)]
"""One that the trainer takes: more would be acknowledged, and not trained."""


class EpisodeEnd(_Request):
    """The end of an episode. A repeated end gets the same answer, a different one `conflict`."""

    task_id: str = Field(min_length=1, max_length=500)
    """The task's id; episodes of one task share a baseline."""
    reward: RewardValue
    reward_parts: dict[str, RewardValue] = Field(default_factory=dict)
    turn_rewards: dict[NonNegativeInt, RewardValue] = Field(default_factory=dict)
    """Number of a model call, from 0 → its reward, in addition to the episode's."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("reward_parts", "metadata")
    @classmethod
    def _fits(cls, value: dict[str, Any]) -> dict[str, Any]:
        if (size := len(to_json(value))) > MAX_REPORT_BYTES:
            raise ValueError(
                f"has {size} bytes as JSON, and the limit is {MAX_REPORT_BYTES}: keep more in a "
                "file of yours, and name it here"
            )
        return value


class Decider(_Request):
    """The episode on another server that decides about a prepared one."""

    url: str = Field(pattern=r"^https?://", max_length=2000)
    episode_id: str = Field(min_length=1, max_length=200)
    key: str = Field(min_length=1, max_length=200)
    """Key of its claim, which authorises the request for its outcome."""


class Prepare(_Request):
    """An end that does not count yet. Without `decider`, this episode decides."""

    end: EpisodeEnd
    decider: Decider | None = None


class EpisodeOutcome(BaseModel):
    """The answer to a server that asks about a deciding episode."""

    state: EpisodeState


class Abort(_Request):
    """The episode never counts."""

    reason: str = ""


class ConfigText(_Request):
    """The trainer's YAML. The server keeps it as text; the trainer reads it."""

    config: str


class Agree(_Request):
    """A client asks for a weight update."""

    client_id: str = Field(min_length=1, max_length=200)


class EpisodeView(BaseModel):
    """What every client may know about an episode."""

    model_config = ConfigDict(frozen=True)

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
    """Why the episode was aborted, expired or dropped; None in other states."""
    version: int = 0
    generation: int = 0
    """Number of the trainer start that the episode belongs to. Versions of different generations
    refer to different weights."""
    claimed_at: float = 0.0
    ended_at: float | None = None
    batch: int | None = None


class Status(BaseModel):
    """The swarm's status. `change` increases with every change; a request with `since` waits for
    the next one."""

    state: EngineState
    detail: str = ""
    change: int = 0
    version: int = 0
    batch: int = 0
    """Number of batches handed to the trainer so far."""
    open_episodes: int = 0
    collected: int = 0
    """Number of ended episodes that wait for a batch."""
    groups_ready: int = 0
    groups_wanted: int = 0
    clients: list[str] = Field(default_factory=list)
    agreed: list[str] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    """Number of episodes by state, since the server's first start."""
    mean_reward: float | None = None
    """Mean reward of the last batch."""
    warning: str = ""
    """Set from 80 % of `swarm.max_collected` on; empty below it."""


class TaskCounts(BaseModel):
    """What became of the episodes of a task.

    Example: TaskCounts(task_id="sum-17", episodes={"trained": 8}, rewards=8, mean_reward=0.5)
    """

    task_id: str
    episodes: dict[str, int]
    """Number of the task's episodes by state."""
    rewards: int
    """Number of its episodes that ended with a reward, evaluation included."""
    mean_reward: float | None
    """Mean of these rewards; None: there is none."""


class TrainerHello(_Request):
    """The message of a trainer that is up, with the sections of its resolved configuration that the
    server uses. From now on, episodes get sessions of this proxy."""

    proxy_url: str
    proxy_admin_key: str
    swarm: SwarmConfig = SwarmConfig()
    rollout: RolloutConfig = RolloutConfig()
    profile: str = "default"
    """The proxy's agent profile."""
    policy: str = ""
    """The policy that episodes sample from; empty: the engines' own weights."""
    run_dir: str = ""
    """The folder in which the run can be resumed; empty: it cannot."""


class TrainerWelcome(BaseModel):
    """The answer to a trainer's hello."""

    generation: int


class TrainerReady(_Request):
    """The trainer asks for its next batch; the batch before is trained."""

    version: int
    wait_s: float = Field(30.0, ge=0, le=300)


class Trained(_Request):
    """The trainer's last checkpoint includes this batch, and the trainer ends."""

    batch: int


class BatchView(BaseModel):
    """A batch: groups of episodes of one task each."""

    number: int
    groups: list[list[EpisodeView]]
