"""The requests of a learner to rank 0: begin, update, publish.

Invariant: an adapter's weights and moments are those of its parent, trained on the batch, bit for
bit the same whenever and wherever that is done on the same software (`trainer.deterministic`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agent_loop.records import Group, Rollout
from trainer.algorithms.token_loss import Metrics
from trainer.batch import build_batch, trained_batch
from trainer.checkpoint import Checkpoints, Saved, random_state, restore_random_state
from trainer.extras.learn.gates import Measures, look, measured
from trainer.extras.ledger.evidence import Evidence, weights_hash
from trainer.fit import TrainOn
from trainer.learning import steps
from trainer.learning.learner import Learner
from trainer.learning.models import Models
from trainer.learning.policies import Learners
from trainer.policy.adapter import adapter_config
from trainer.weight_sync.adapters import AdapterSync
from trainer.weight_sync.control import EngineControl

ALL = 1_000_000
"""Adapters that are kept: the journal says which may go."""
SERVED = "served"


@dataclass(frozen=True, slots=True)
class Adapters:
    """The saved adapters of a learner. Example: Adapters(Path("runs/work"), "work")"""

    folder: Path
    policy: str

    def path(self, number: int) -> Path:
        return self.folder / "adapters" / f"step-{number:06d}"

    def save(self, learner: Learner, number: int) -> None:
        learner.step = learner.version = number
        state = {
            "policies": {self.policy: learner.state},
            "random": random_state(),
            "version": number,
            "loop": {},
        }
        checkpoints = Checkpoints(self.folder / "adapters", keep_last=ALL)
        models = {self.policy: learner.models}
        checkpoints.save(number, models, state, learner.config.model.path)

    def load(self, learner: Learner, number: int) -> None:
        """Raises CheckpointError: it is missing, or of another model."""
        checkpoints = Checkpoints(self.folder / "adapters", keep_last=ALL)
        saved = Saved(self.path(number), number)
        state = checkpoints.read_run(saved)
        checkpoints.load(saved, {self.policy: learner.models})
        learner.continue_from(state["policies"][self.policy])
        restore_random_state(state["random"])


@dataclass(frozen=True, slots=True)
class Begin:
    """Saves adapter 0, which changes nothing, if it is not there. Returns its hash."""

    adapters: Adapters

    def on(self, learners: Learners) -> str:
        learner = learners.only
        if not self.adapters.path(0).exists():
            self.adapters.save(learner, 0)
        self.adapters.load(learner, 0)
        return weights_hash(learner)


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did."""

    evidence: Evidence
    metrics: Metrics
    measures: Measures


@dataclass(frozen=True, slots=True)
class BeginSchedule:
    """Begins the schedule of the learning rate, which is that of one update, on all ranks."""

    def on(self, models: Models) -> None:
        models.policy.stepper.begin_schedule()


@dataclass(frozen=True, slots=True)
class UpdateAdapter:
    """Trains adapter `number` on these groups, from its parent, and saves it."""

    adapters: Adapters
    number: int
    parent: int
    groups: Sequence[Group]
    bad: float
    """Weight of bad evidence; all of it together weighs at most this share of the good evidence."""
    held_out: Sequence[Group] = ()
    keep: bool = True
    """Whether the adapter is saved."""

    def on(self, learners: Learners) -> Updated:
        """Raises TrainingError: there is no token to train, or a gradient is not finite."""
        learner = learners.only
        self.adapters.load(learner, self.parent)
        temperature = learner.config.rollout.temperature
        groups = balanced(self.groups, self.bad)
        batch = trained_batch(groups)
        test = build_batch(self.held_out) if self.held_out else None
        before = look(learner, batch, temperature)
        test_before = None if test is None else look(learner, test, temperature)
        learner.models.together(BeginSchedule())
        result = TrainOn(groups, keep_evidence=True).on(learners)
        after = look(learner, batch, temperature)
        held_out = None
        if test is not None and test_before is not None:
            held_out = (test, test_before, look(learner, test, temperature))
        if self.keep:
            self.adapters.save(learner, self.number)
        found = measured((batch, before, after), held_out, self.parent)
        return Updated(result.evidence, result.metrics, found)


def balanced(groups: Sequence[Group], bad: float) -> list[Group]:
    """The groups with the values of their turns as the loss takes them.

    Many bad answers and few good ones would only take the policy away from everything that it
    does. So all bad ones together weigh at most `bad` of the good ones, and the values are scaled
    to a mean size of 1 per turn: the KL divergence, which every token has, would otherwise outweigh
    evidence that is mostly bad. Without a good answer, each bad one weighs `bad`.

    Example: one turn of 1.0 and ten of -1.0, with bad=0.3, become one of 8.46 and ten of -0.254.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    values = [value for rollout in rollouts for value in rollout.turn_returns.values()]
    good = math.fsum(value for value in values if value > 0)
    of_bad = -math.fsum(value for value in values if value < 0)
    weight = bad * min(1.0, good / of_bad) if good and of_bad else bad
    size = (good + weight * of_bad) / len(values) if good else 1.0
    scale = 1 / size

    def weighed(rollout: Rollout) -> Rollout:
        turns = rollout.turn_returns.items()
        returns = {turn: scale * (v if v > 0 else weight * v) for turn, v in turns}
        return replace(rollout, turn_returns=returns)

    return [replace(group, rollouts=tuple(map(weighed, group.rollouts))) for group in groups]


@dataclass(frozen=True, slots=True)
class CompareAdapters:
    """Returns, for each session, log π_canary − log π_stable of its sampled tokens, in nats."""

    adapters: Adapters
    canary: int
    stable: int
    groups: Sequence[Group]

    def on(self, learners: Learners) -> dict[str, float]:
        """Raises CheckpointError: an adapter is missing."""
        learner = learners.only
        batch = build_batch(self.groups)
        temperature = learner.config.rollout.temperature
        sums = []
        for number in (self.canary, self.stable):
            self.adapters.load(learner, number)
            found = steps.compute_logprobs(learner.models, batch, temperature=temperature)
            zeros = torch.zeros(batch.num_rollouts, dtype=torch.float64)
            sums.append(zeros.index_add(0, batch.rollout, found.logprobs.double()))
        ratios = (sums[0] - sums[1]).tolist()
        return dict(zip(batch.trial_ids, ratios, strict=True))


@dataclass(frozen=True, slots=True)
class PublishAdapter:
    """Loads a saved adapter in the engines, and compares both on the probe. Returns the engines'
    name of it."""

    adapters: Adapters
    number: int
    engines: Sequence[str]
    probe: Sequence[int]

    def on(self, learners: Learners) -> str:
        """Raises WeightSyncError: an engine does not serve it exactly."""
        learner = learners.only
        self.adapters.load(learner, self.number)
        policy = f"{self.adapters.policy}-{self.number}"
        control = EngineControl(self.engines)
        with closing(AdapterSync(control, self.adapters.folder / SERVED, policy)) as sync:
            with closing(learner.models.adapter()) as tensors:
                sync.push(tensors, adapter_config(learner.models.policy.model), self.number)
            if len(self.probe) > 1:
                tolerance = learner.config.engine.probe_tolerance(learner.config.model)
                sync.verify(list(self.probe), learner.score(self.probe), tolerance)
            return sync.served_name
