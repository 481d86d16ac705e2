"""The requests of a learner to rank 0: begin, update, publish.

Invariant: an adapter's weights and moments are those of its parent, trained on the batch, bit for
bit the same whenever and wherever that is done on the same software (`trainer.deterministic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent_loop.records import Group
from trainer.algorithms.token_loss import Metrics
from trainer.batch import build_batch, trained_batch
from trainer.checkpoint import Checkpoints, Saved, random_state, restore_random_state
from trainer.extras.learn.gates import Measures, look, measured
from trainer.extras.ledger.evidence import Evidence, weights_hash
from trainer.fit import TrainOn
from trainer.learning.learner import Learner
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
class UpdateAdapter:
    """Trains adapter `number` on these groups, from its parent, and saves it."""

    adapters: Adapters
    number: int
    parent: int
    groups: Sequence[Group]
    held_out: Sequence[Group] = ()
    keep: bool = True
    """Whether the adapter is saved."""

    def on(self, learners: Learners) -> Updated:
        """Raises TrainingError: there is no token to train, or a gradient is not finite."""
        learner = learners.only
        self.adapters.load(learner, self.parent)
        temperature = learner.config.rollout.temperature
        batch = trained_batch(self.groups)
        test = build_batch(self.held_out) if self.held_out else None
        before = look(learner, batch, temperature)
        test_before = None if test is None else look(learner, test, temperature)
        result = TrainOn(self.groups, keep_evidence=True).on(learners)
        after = look(learner, batch, temperature)
        held_out = None
        if test is not None and test_before is not None:
            held_out = (test, test_before, look(learner, test, temperature))
        if self.keep:
            self.adapters.save(learner, self.number)
        found = measured((batch, before, after), held_out, self.parent)
        return Updated(result.evidence, result.metrics, found)


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
