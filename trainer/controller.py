"""`TrainController`: the low-level steps of learning, on a batch of what agents did.

    groups ─▶ build_batch ─▶ compute_logprobs ─▶ compute_ref_logprobs ─▶ compute_values
           ─▶ compute_advantages ─▶ train_step ─▶ sync_weights

`learn` is all but the last of these; `trainer.fit` puts sampling around them.

Invariant: what is trained is what was sampled. Every step checks that each rollout's trained
tokens are as many as its sampled ones, and that trainer and engine give tokens of the same weights
the same probabilities; it stops the run where they do not.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from agent_loop.records import Group
from trainer.batch import Batch, build_batch
from trainer.checkpoint import (
    generator_state,
    random_state,
    restore_generator,
    restore_random_state,
)
from trainer.config import TrainerConfig
from trainer.errors import TrainingError
from trainer.policy.flops import training_flops, utilisation
from trainer.policy.learner import Learner
from trainer.policy.probe import score_ids
from trainer.run.rollout_metrics import mismatch_metrics, rollout_metrics, staleness_metrics
from trainer.weight_sync.sync import WeightSync

Metrics = dict[str, float]


class TrainController:
    """Example: a step of one's own:
    batch = build_batch(groups)
    metrics = controller.compute_logprobs(batch) | controller.compute_advantages(batch)
    metrics |= controller.train_step(batch) | controller.sync_weights()
    """

    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        sync: WeightSync,
        probe: Sequence[int] = (),
    ) -> None:
        """`probe`: what trainer and engine are compared on after each update; none: nothing."""
        self.config = config
        self.learner = learner
        self.policy = learner.policy
        self.algorithm = learner.algorithm
        self.sync = sync
        self.probe = list(probe)
        self.step = 0
        """Training steps made."""
        self.version = 0
        """Of the policy's weights: one more with every update."""
        self.generator = torch.Generator().manual_seed(config.trainer.seed)
        """Orders mini-batches."""

    def learn(self, groups: Sequence[Group]) -> Metrics:
        """One update from one batch of groups. `actor/update_steps` is 0 where none was made.

        Raises:
            TrainingError: nothing in the batch can be trained, or what would be trained is not
                what was sampled.
        """
        metrics = rollout_metrics(groups, success_at=self.config.eval.success_at)
        started = time.perf_counter()
        batch = build_batch(groups)
        check_tokens(groups, batch)
        metrics |= staleness_metrics(batch, self.version)
        for part in (
            self.compute_logprobs,
            self.compute_ref_logprobs,
            self.compute_values,
            self.compute_advantages,
            self.train_step,
        ):
            metrics |= part(batch)
        metrics |= self._speed(batch, time.perf_counter() - started)
        metrics["memory/peak_gib"] = _peak_gib()
        self.step += 1
        if metrics["actor/update_steps"]:
            self.version += 1
        return metrics

    def _speed(self, batch: Batch, seconds: float) -> Metrics:
        """Of the policy's passes: one forward pass before the update, then every epoch."""
        passes = self.algorithm.config.epochs + 1 / 3
        flops = training_flops(self.policy.model, batch, passes=passes)
        metrics = {"throughput/input_tokens_per_s": batch.input_tokens / seconds}
        share = utilisation(flops, seconds, self.policy.device, self.policy.ranks.size)
        return metrics if share is None else metrics | {"throughput/mfu": share}

    def compute_logprobs(self, batch: Batch) -> Metrics:
        """Sets `batch.prox_logprobs`, the policy's before the update; how far the engine's are.

        Raises:
            TrainingError: tokens of the present weights have other probabilities here.
        """
        scores = self.learner.compute_logprobs(batch, temperature=self.config.rollout.temperature)
        metrics = mismatch_metrics(batch, scores.logprobs, self.version)
        metrics["actor/entropy_before"] = float(scores.entropy.mean())
        mean = metrics.get("mismatch/logp_abs_mean", 0.0)
        if mean > self.config.mismatch_tolerance:
            raise TrainingError(
                f"step {self.step + 1}: trainer and engine differ by mean |Δ log p| = {mean:.2e} "
                f"on the same weights, at most {self.config.mismatch_tolerance:.0e} is expected; "
                "check engine.dtype and rollout.temperature, or raise engine.verify_tolerance"
            )
        return metrics

    def compute_ref_logprobs(self, batch: Batch) -> Metrics:
        """Sets `batch.ref_logprobs` and `batch.teacher_logprobs` where the algorithm needs them."""
        self.learner.compute_ref_logprobs(batch, temperature=self.config.rollout.temperature)
        return {}

    def compute_values(self, batch: Batch) -> Metrics:
        """Sets `batch.values` where the algorithm has a critic."""
        self.learner.compute_values(batch)
        return {}

    def compute_advantages(self, batch: Batch) -> Metrics:
        """Sets `batch.advantages`."""
        return self.algorithm.compute_advantages(batch)

    def train_step(self, batch: Batch) -> Metrics:
        """The optimizer steps of one batch, each in as many micro-batches as memory needs.

        No step is made, and `actor/update_steps` is 0, where the algorithm trains on no group,
        and while only the critic warms up.
        """
        metrics = self.learner.train_step(
            batch,
            temperature=self.config.rollout.temperature,
            version=self.version,
            generator=self.generator,
        )
        return {"actor/update_steps": 0.0} | metrics

    def sync_weights(self) -> Metrics:
        """The policy's weights into every engine, and the proof that they serve them.

        Raises:
            WeightSyncError: an engine refused them, or does not serve them.
        """
        with closing(self.learner.weights()) as weights:
            report = self.sync.push(weights, self.version)
        metrics = {"sync/paused_s": report.paused_s, "sync/total_s": report.total_s}
        if self.config.engine.verify and len(self.probe) > 1:
            ours = score_ids(self.learner, self.probe)
            tolerance = self.config.probe_tolerance
            metrics["sync/probe_abs_mean"] = self.sync.verify(self.probe, ours, tolerance)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the run besides the learners' tensors, as JSON."""
        return {
            "step": self.step,
            "version": self.version,
            "generator": generator_state(self.generator),
            "random": random_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.version = int(state["step"]), int(state["version"])
        restore_generator(self.generator, state["generator"])
        restore_random_state(state["random"])


def _peak_gib() -> float:
    """Of this process, on the GPU where it trains on one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def check_tokens(groups: Sequence[Group], batch: Batch) -> None:
    """Every rollout trains exactly the tokens that were sampled in it.

    Raises:
        TrainingError: it does not, or there is no token to train.
    """
    sampled = {
        rollout.trial_id: rollout.sampled_tokens
        for group in groups
        for rollout in group.rollouts
        if rollout.trainable
    }
    if not sampled:
        ends = sorted({r.error or r.status.value for g in groups for r in g.rollouts})
        raise TrainingError(f"no rollout of the batch can be trained: {'; '.join(ends)[:300]}")
    trained = dict(zip(batch.trial_ids, batch.rollout_tokens.tolist(), strict=True))
    for trial, count in sampled.items():
        if trained.get(trial, 0) != count:
            raise TrainingError(
                f"rollout {trial}: {count} tokens were sampled, {trained.get(trial, 0):.0f} would "
                "be trained"
            )
