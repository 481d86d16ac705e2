"""The `swarm` section of the trainer's configuration, and the plan that a run's batches follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_loop.producers.rollout_config import RolloutConfig
from proxy.settings.section import Common, Section

StopRule = Literal["episodes", "tasks", "tasks_with_signal", "any_client", "all_clients"]

_MOVED = {"groups": "rollout.groups_per_step", "group_size": "rollout.group_size"}


class SwarmConfig(Section):
    """Example: SwarmConfig(stop_rule="tasks", left_over="drop", max_open=64)"""

    stop_rule: Common[StopRule] = "tasks"
    """When a batch is full. `episodes`: `rollout.groups_per_step` times `rollout.group_size`
    episodes have ended. `tasks`: `rollout.groups_per_step` tasks have a full group.
    `tasks_with_signal`: the same, and the rewards of each group differ. `any_client`,
    `all_clients`: any client, or every client, has asked for the update; the batch is then
    everything that has ended."""
    left_over: Common[Literal["carry", "drop", "train"]] = "carry"
    """What happens to ended episodes outside the batch: `carry` keeps them for the next batch,
    `drop` discards and counts them, `train` adds them to this batch. With `carry`, claimed episodes
    continue while the batch is trained; otherwise they may end within `drain_timeout_s` and are
    aborted after that. Under `tasks_with_signal`, a full group of equal rewards never enters a
    batch: unless this is `train`, it is dropped and counted."""
    drain_timeout_s: float = Field(60.0, ge=0)
    """Seconds that claimed episodes may still take once the batch is full."""
    lease_s: Common[float] = Field(60.0, gt=0)
    """Seconds without a heartbeat after which an episode is reclaimed."""
    max_life_s: float = Field(3600.0, gt=0)
    """Seconds after which an episode is reclaimed, with or without heartbeats."""
    max_open: Common[int] = Field(256, ge=1)
    """Number of episodes that may be open at the same time."""
    max_collected: Common[int] = Field(4096, ge=1)
    """Number of ended episodes that may wait for a batch. At this number, claims wait."""
    mix: dict[str, float] = Field(default_factory=dict)
    """Share of a batch's episodes for each `source`. Empty: any source. A source that is missing
    here gets no episodes."""

    @model_validator(mode="before")
    @classmethod
    def _name_successors(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for old, new in _MOVED.items():
                if old in given:
                    raise ValueError(f"swarm.{old} no longer exists: set {new}={given[old]}")
        return given


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The sections of one run's configuration that say what a batch is.

    Example: BatchPlan(SwarmConfig(), RolloutConfig(groups_per_step=4, group_size=8))
    """

    swarm: SwarmConfig
    rollout: RolloutConfig

    @property
    def episodes(self) -> int:
        """Number of episodes in a full batch."""
        return self.rollout.groups_per_step * self.rollout.group_size
