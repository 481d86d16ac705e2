"""`Learners`: the learners of a run, one for each policy.

A run without `trainer.policies` has one, whose name is "". With several, each has an adapter, an
optimizer and random generators of its own, and all share one copy of the weights of `model.path`.

Invariant: all have executed the same steps, and the version of each trained policy is the number of
the run's updates, so that staleness means the same for all of them. A policy that a step did not
train is sent again as the new version, with the adapter that it had. A frozen policy has version 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agent_loop.records import Group
from proxy.records import ServedPolicy
from trainer.algorithms.token_loss import Metrics
from trainer.checkpoint import Checkpoints, random_state, restore_random_state
from trainer.errors import CheckpointError, TrainingError
from trainer.learning.learner import Learner, RunState
from trainer.learning.models import Models
from trainer.learning.policy_metrics import of_policies
from trainer.learning.policy_parts import parts_of
from trainer.weight_sync.dtypes import Report
from trainer.weight_sync.published import Published


class Learners:
    """Example:
    learners = Learners({"planner": …, "coder": …, "fixed": …}, frozen={"fixed"})
    learners.connect(engine_urls, adapters)
    metrics = learners.sync_weights()
    """

    def __init__(
        self, learners: Mapping[str, Learner], frozen: frozenset[str] = frozenset()
    ) -> None:
        self._all = dict(learners)
        self._first = next(iter(self._all.values()))
        self.trained = {name: each for name, each in self._all.items() if name not in frozen}
        """The learners of the policies that are trained."""

    @classmethod
    def of(cls, learner: Learner) -> Learners:
        """The learner of the only policy."""
        return cls({"": learner})

    @property
    def step(self) -> int:
        """Number of executed training steps."""
        return max(learner.step for learner in self.trained.values())

    @property
    def version(self) -> int:
        """Number of updates, which is the version of each trained policy."""
        return max(learner.version for learner in self.trained.values())

    @property
    def only(self) -> Learner:
        """The learner of a run with one policy.

        Raises:
            TrainingError: the run has several.
        """
        if len(self._all) > 1:
            raise TrainingError(f"the run has several policies: {', '.join(self._all)}")
        return self._first

    def connect(self, engine_urls: Sequence[str], adapters: Path | None) -> None:
        """As `Learner.connect`, for each policy."""
        for learner in self._all.values():
            learner.connect(engine_urls, adapters)

    def engines_asleep(self) -> AbstractContextManager[None]:
        """As `Learner.engines_asleep`."""
        return self._first.engines_asleep()

    def free_cache(self) -> None:
        """As `Learner.free_cache`: the policies are in the same processes."""
        self._first.free_cache()

    def parts(self, groups: Sequence[Group]) -> Mapping[str, Sequence[Group]]:
        """Policy → its part of the groups, for the policies that have tokens to train.

        Raises:
            TrainingError: a token would not be trained by exactly one policy.
        """
        if len(self.trained) == 1:
            return dict.fromkeys(self.trained, groups)
        parts = {name: parts_of(groups, name) for name in self.trained}
        sampled = _trained_tokens(groups)
        given = sum(_trained_tokens(part) for part in parts.values())
        if sampled != given:
            raise TrainingError(
                f"{sampled} tokens were sampled by the policies {', '.join(self.trained)}, but "
                f"{given} would be trained"
            )
        with_tokens = {name: part for name, part in parts.items() if _trained_tokens(part)}
        return with_tokens or parts

    def step_ended(self) -> None:
        """To be called after each step: gives all policies the same step and version."""
        step, version = self.step, self.version
        for learner in self.trained.values():
            learner.step, learner.version = step, version

    def sync_weights(self) -> Metrics:
        """As `Learner.sync_weights`, for each policy that its engines do not have."""
        return of_policies(
            {
                name: learner.sync_weights()
                for name, learner in self._all.items()
                if name in self.trained or learner.served is None
            }
        )

    def publish_weights(self, run: str, held: Sequence[Report]) -> Published:
        """As `Learner.publish_weights`, of the only policy."""
        return self.only.publish_weights(run, held)

    @property
    def served(self) -> tuple[ServedPolicy, ...]:
        """The versions of adapters that the engines have, which the proxy must publish."""
        served = (learner.served for learner in self._all.values())
        return tuple(each for each in served if each is not None)

    def save(self, checkpoints: Checkpoints, loop: dict[str, Any], *, best: bool) -> None:
        """As `Learner.save`: one checkpoint of all trained policies."""
        if "" in self._all:
            self.only.save(checkpoints, loop, best=best)
            return
        state = {
            "version": self.version,
            "policies": {name: learner.state for name, learner in self.trained.items()},
            "random": random_state(),
            "loop": loop,
        }
        checkpoints.save(self.step, self._models, state, self._first.config.model.path, best=best)

    def restore(self, checkpoints: Checkpoints) -> RunState:
        """As `Learner.restore`, for all trained policies.

        Raises:
            CheckpointError: the checkpoint is of other policies.
        """
        if "" in self._all:
            return self.only.restore(checkpoints)
        saved = checkpoints.latest()
        if saved is None:
            return RunState(self.step, self.version, {})
        state = checkpoints.read_run(saved)
        if (found := state.get("policies", {})).keys() != self.trained.keys():
            raise CheckpointError(
                f"{saved.path} is a checkpoint of {', '.join(found) or 'one policy'}, but this run "
                f"trains {', '.join(self.trained)}; set trainer.policies as it was, or begin a new "
                "run with trainer.resume=never"
            )
        checkpoints.load(saved, self._models)
        for name, learner in self.trained.items():
            learner.continue_from(found[name])
        restore_random_state(state["random"])
        return RunState(self.step, self.version, state["loop"])

    def close(self) -> None:
        """Disconnects from the engines."""
        for learner in self._all.values():
            learner.close()

    @property
    def _models(self) -> dict[str, Models]:
        return {name: learner.models for name, learner in self.trained.items()}


def _trained_tokens(groups: Sequence[Group]) -> int:
    return sum(each.sampled_tokens for group in groups for each in group.rollouts if each.trainable)
