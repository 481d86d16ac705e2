"""`TrainController`: the low-level steps of learning, and `fit`, which is their composition.

Invariant: what is trained is what was sampled. Every step checks that each rollout's trained
tokens are as many as its sampled ones, and that trainer and engine give tokens of the same weights
the same probabilities; it stops the run where they do not.

    groups ─▶ build_batch ─▶ compute_logprobs ─▶ compute_ref_logprobs ─▶ compute_values
           ─▶ compute_advantages ─▶ train_step ─▶ sync_weights
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from agent_loop.evaluator import EvalReport
from agent_loop.records import Group
from trainer.batch import Batch, build_batch
from trainer.config import TrainerConfig
from trainer.errors import TrainingError
from trainer.learner import Learner
from trainer.probe import score_ids
from trainer.rollout_metrics import mismatch_metrics, rollout_metrics, staleness_metrics
from trainer.run_control import RunControl, StopRequested
from trainer.run_log import RunLog
from trainer.weight_sync.sync import WeightSync

Metrics = dict[str, float]


class Producer(Protocol):
    """Implementations: `agent_loop.producers`, synchronous and asynchronous."""

    async def next_batch(self, version: int) -> list[Group]: ...


class Evaluates(Protocol):
    """Implementation: `agent_loop.evaluator.Evaluator`."""

    async def evaluate(self, version: int) -> EvalReport: ...


class TrainController:
    """Example: a step of one's own, without `fit`:
    batch = build_batch(groups)
    metrics = controller.compute_logprobs(batch) | controller.compute_advantages(batch)
    metrics |= controller.train_step(batch) | controller.sync_weights()
    """

    def __init__(self, config: TrainerConfig, learner: Learner, sync: WeightSync) -> None:
        self.config = config
        self.learner = learner
        self.policy = learner.policy
        self.algorithm = learner.algorithm
        self.sync = sync
        self.step = 0
        """Training steps made."""
        self.version = 0
        """Of the policy's weights; one more per step."""
        self.generator = torch.Generator().manual_seed(config.trainer.seed)
        """Orders mini-batches."""
        self.probe: Sequence[int] = ()
        """What trainer and engine are compared on after each update; none: they are not."""

    async def fit(
        self, producer: Producer, evaluator: Evaluates | None, log: RunLog, control: RunControl
    ) -> str:
        """Trains to the configured end: `done`, or `stopped` when it was asked to stop."""
        evals = self.config.eval
        try:
            log.progress.phase(self.step, "sending weights")
            await asyncio.to_thread(self.sync_weights)
            if evaluator and evals.before and self.step == 0:
                await self.evaluate("before", evaluator, log, control)
            while not self._over(log):
                await self._fit_step(producer, log, control)
                if evaluator and evals.every and self.step % evals.every == 0:
                    await self.evaluate(str(self.step), evaluator, log, control)
            if evaluator and evals.after:
                await self.evaluate("after", evaluator, log, control)
        except StopRequested:
            return "stopped"
        return "done"

    async def evaluate(
        self, name: str, evaluator: Evaluates, log: RunLog, control: RunControl
    ) -> float:
        """Held-out success, logged under `name`."""
        log.progress.phase(self.step, f"evaluation {name}")
        report = await control.wait_for(evaluator.evaluate(self.version))
        log.evaluation(self.step, name, report)
        return report.overall.success

    def learn(self, groups: Sequence[Group]) -> Metrics:
        """One update from one batch of groups: every step but sampling and sync.

        Raises:
            TrainingError: nothing in the batch can be trained, or what would be trained is not
                what was sampled.
        """
        metrics = rollout_metrics(groups, success_at=self.config.eval.success_at)
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
        return metrics

    def compute_logprobs(self, batch: Batch) -> Metrics:
        """Sets `batch.prox_logprobs`: the policy's before the update; how far the engine's are.

        Raises:
            TrainingError: tokens of the present weights have other probabilities here.
        """
        if not self.algorithm.needs_prox:
            return {}
        scores = self.learner.compute_logprobs(batch, temperature=self.config.rollout.temperature)
        metrics = mismatch_metrics(batch, scores.logprobs, self.version)
        metrics["actor/entropy"] = float(scores.entropy.mean())
        mean = metrics.get("mismatch/logp_abs_mean", 0.0)
        if mean > self.config.mismatch_tolerance:
            raise TrainingError(
                f"step {self.step + 1}: trainer and engine differ by mean |Δ log p| = {mean:.2e} "
                f"on the same weights, at most {self.config.mismatch_tolerance:.0e} is expected; "
                "check engine.dtype and rollout.temperature, or raise engine.verify_tolerance"
            )
        return metrics

    def compute_ref_logprobs(self, batch: Batch) -> Metrics:
        """Sets `batch.ref_logprobs` where the algorithm has a reference (or a teacher)."""
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

        No step is made, and `actor/update_steps` is 0, where the algorithm trains on no group.
        """
        return self.learner.train_step(
            batch,
            temperature=self.config.rollout.temperature,
            version=self.version,
            generator=self.generator,
        )

    def sync_weights(self) -> Metrics:
        """The policy's weights into every engine, and the proof that they serve them."""
        report = self.sync.push(self.policy.named_hf_parameters(), self.version)
        metrics = {"sync/paused_s": report.paused_s, "sync/total_s": report.total_s}
        if self.config.engine.verify and len(self.probe) > 1:
            ours = score_ids(self.policy, self.probe)
            tolerance = self.config.mismatch_tolerance
            metrics["sync/probe_abs_mean"] = self.sync.verify(list(self.probe), ours, tolerance)
        return metrics

    async def _fit_step(self, producer: Producer, log: RunLog, control: RunControl) -> None:
        clock = _Clock()
        step = self.step + 1
        log.progress.phase(step, "sampling")
        groups = await control.wait_for(producer.next_batch(self.version))
        clock.lap("sample")
        log.progress.phase(step, "training")
        metrics = await asyncio.to_thread(self.learn, groups)
        clock.lap("train")
        if metrics["actor/update_steps"]:
            self.version += 1
            metrics |= await asyncio.to_thread(self.sync_weights)
        clock.lap("sync")
        self.step = step
        metrics |= clock.metrics(metrics.get("rollout/sampled_tokens", 0.0))
        metrics["policy_version"] = float(self.version)
        log.step(step, metrics, [r for group in groups for r in group.rollouts])

    def _over(self, log: RunLog) -> bool:
        limits = self.config.trainer
        late = limits.max_wall_s is not None and log.wall_s >= limits.max_wall_s
        return late or self.step >= limits.steps


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


class _Clock:
    """Seconds per phase of a step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = self._last = now()
        self._laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = self._now()
        self._laps[f"time/{name}_s"] = now - self._last
        self._last = now

    def metrics(self, tokens: float) -> Metrics:
        total = self._last - self._started
        return self._laps | {
            "time/step_s": total,
            "throughput/tokens_per_s": tokens / total,
            "throughput/sample": tokens / self._laps["time/sample_s"],
            "throughput/train": tokens / self._laps["time/train_s"],
        }
