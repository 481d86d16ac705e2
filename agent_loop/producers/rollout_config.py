"""The `rollout` section of a run: what a batch is, and how stale it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agent_loop.outside_parts import OwnFunction
from agent_loop.producers.protocol import PRODUCER_MEMBERS, Producer, RunsTrials
from agent_loop.records import Group
from agent_loop.trial.config import SamplingConfig
from proxy.errors import ConfigurationError
from proxy.settings.section import Common

if TYPE_CHECKING:
    from agent_loop.tasks import TaskStream


class GroupFilter(OwnFunction):
    """A function of your own, which says whether a finished group is kept for training."""

    kind = "filter"

    def __call__(self, group: Group) -> bool:
        return bool(self.called(group))


class OwnProducer(OwnFunction):
    """A function of your own, which makes the producer of the run."""

    kind = "producer"

    def __call__(
        self, loop: RunsTrials, tasks: TaskStream, config: RolloutConfig, seed: int
    ) -> Producer:
        """Raises ConfigurationError: it returned something else."""
        producer = self.called(loop, tasks, config, seed)
        if missing := [name for name in PRODUCER_MEMBERS if not hasattr(producer, name)]:
            raise ConfigurationError(
                f"rollout.producer={self.target} returned a {type(producer).__name__} without "
                f"{', '.join(missing)}; it must return an agent_loop.producers.protocol.Producer"
            )
        made: Producer = producer
        return made


class RolloutConfig(SamplingConfig):
    """Example: RolloutConfig(groups_per_step=8, group_size=4, max_staleness=2, over_sample=0.25)"""

    groups_per_step: Common[int] = Field(8, ge=1)
    """Number of groups in the batch of a training step; each group is of one task."""
    group_size: Common[int] = Field(8, ge=1)
    """Number of trials per group; they share a baseline."""
    concurrency: Common[int] = Field(32, ge=1)
    """Maximum number of trials that run at the same time."""
    max_staleness: Common[int] = Field(1, ge=0)
    """Mode `separate` only: maximum number of updates between the weights that sampled a token of a
    batch and the weights that are trained on it."""
    stale: Literal["drop", "mask"] = "drop"
    """Mode `separate` only: what happens to a group that is older than `max_staleness`. `drop`: the
    whole group is dropped, and cancelled if it is still running. `mask`: only its old tokens are
    not trained."""
    over_sample: float = Field(0.0, ge=0)
    """Mode `separate` only: number of additional groups that run while the trainer waits, as a
    share of `groups_per_step`. The groups that finish first form the batch."""
    partial_rollout: bool = True
    """Mode `separate` only: trials continue across a weight update, each token with its version.
    False: they are cancelled at the update."""
    tail_groups: int = Field(0, ge=0)
    """Mode `separate` only: number of groups, cancelled for their age, that are collected before
    they are run again without over-sampling, so that slow tasks are trained, too. 0: cancelled
    groups are dropped."""
    min_group_size: int = Field(1, ge=1)
    """Minimum number of trainable rollouts in a group; a group with fewer is replaced by a group of
    another task."""
    straggler_factor: float | None = Field(None, gt=1)
    """A trial is aborted once it has run this many times as long as the median of its group's
    finished trials, after half of the group has finished. None: never."""
    drop_uniform_groups: bool = False
    """Replace groups whose rewards are all equal, also those of single turns, by other groups
    (DAPO's dynamic sampling, arXiv 2503.14476)."""
    filter: GroupFilter | None = None
    """A function of your own; a group for which it returns False is replaced by a group of another
    task. The run ends when `max_resamples` times `groups_per_step` groups in a row are left out."""
    producer: OwnProducer | None = None
    """A function of your own that makes the producer, in place of the one of `trainer.mode`. See
    `examples/branching` for rollouts that branch from others."""
    max_resamples: int = Field(4, ge=1)
    """Limit on the groups that are run for one batch, as a multiple of `groups_per_step`. With
    `drop_uniform_groups`, uniform groups are kept once the limit would be exceeded otherwise. The
    run ends when this many groups in a row have fewer trainable rollouts than `min_group_size`."""
