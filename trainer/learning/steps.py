"""The steps of training that compute a batch on all ranks.

Invariant: rank 0 alone has the whole batch. A function here divides it, deals each rank its part,
and joins what the ranks compute. A part of an update belongs to one optimizer step.

Shapes: `N` trained tokens of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.imitation import imitation_loss, imitation_weights
from trainer.algorithms.token_loss import Metrics, StepWeights
from trainer.algorithms.value_losses import explained_variance
from trainer.batch import Batch, joined
from trainer.learning.models import AdaptersOff, FrozenModel, Models
from trainer.policy.critic import Critic
from trainer.policy.scores import Scores
from trainer.policy.trainable import Trainable
from trainer.policy.update import train_part

Scorer = Literal["policy", "base", "reference", "teacher"]
"""Name of a model in `Models`; `base` is the policy without its adapter."""


def compute_logprobs(models: Models, batch: Batch, *, temperature: float) -> Scores:
    """Scores the batch with the policy; sets `batch.prox_logprobs` and `batch.entropies`."""
    scores = _scores(models, models.policy, "policy", batch, temperature)
    batch.prox_logprobs, batch.entropies = scores.logprobs, scores.entropy
    return scores


def base_logprobs(models: Models, batch: Batch, *, temperature: float) -> Scores:
    """Scores the batch with the weights that the policy's LoRA adapter adapts, without it."""
    return _scores(models, AdaptersOff(models.policy), "base", batch, temperature)


def compute_ref_logprobs(models: Models, batch: Batch, *, temperature: float) -> None:
    """Sets `batch.ref_logprobs` and `batch.teacher_logprobs` if there are such models."""
    if models.reference is not None:
        scores = _scores(models, models.reference, "reference", batch, temperature)
        batch.ref_logprobs = scores.logprobs
    if models.teacher is not None:
        scores = _scores(models, models.teacher, "teacher", batch, temperature)
        batch.teacher_logprobs = scores.logprobs


def compute_values(models: Models, batch: Batch) -> None:
    """Sets `batch.values` if there is a critic."""
    if models.critic is not None:
        parts = models.critic.parts(batch)
        found = models.deal([ValuePart(part.batch) for part in parts])
        batch.values = joined(parts, found)


def update(
    models: Models, batch: Batch, *, temperature: float, version: int, generator: torch.Generator
) -> Metrics:
    """Trains the critic on the batch, then the policy, except during the critic's warm-up.

    `version` is the version of the policy's weights before the update; `generator` draws the
    mini-batches. Returns metrics, which are means over optimizer steps.
    Raises TrainingError as `update_policy`.
    """
    metrics: Metrics = {}
    warming_up = False
    if models.critic is not None:
        learnt = update_critic(models, models.critic, batch, generator=generator)
        metrics |= {f"critic/{name}": value for name, value in learnt.items()}
        settings = models.algorithm.config.critic
        warming_up = settings is not None and models.updates < settings.warmup_steps
    models.updates += 1
    if warming_up:
        return metrics
    learnt = update_policy(
        models, batch, temperature=temperature, version=version, generator=generator
    )
    return metrics | {f"actor/{name}": value for name, value in learnt.items()}


def update_policy(
    models: Models, batch: Batch, *, temperature: float, version: int, generator: torch.Generator
) -> Metrics:
    """Trains the policy on a batch that has advantages.

    If the algorithm trains on none of the groups, no step is executed and `update_steps` is 0.
    Raises TrainingError if a token of a mini-batch was not trained exactly once.
    """

    def part(batch: Batch, weights: StepWeights, expected: int) -> TrainPolicy:
        return TrainPolicy(batch, weights, expected, temperature, version)

    metrics = _mean_over_steps(_optimizer_steps(models, models.policy, batch, part, generator))
    if "kl_loss" in metrics:
        models.algorithm.adapt_kl(metrics["kl_loss"])
    return metrics


def update_critic(
    models: Models, critic: Critic, batch: Batch, *, generator: torch.Generator
) -> Metrics:
    """Trains the critic towards the batch's value targets, in the algorithm's mini-batches.

    Raises TrainingError like `update_policy`, and if there are no values or targets.
    """
    metrics = _mean_over_steps(_optimizer_steps(models, critic, batch, TrainCritic, generator))
    if batch.values is not None and batch.value_targets is not None:
        metrics["explained_variance"] = explained_variance(batch.values, batch.value_targets)
    return metrics


def imitate(models: Models, batch: Batch, aggregation: Aggregation) -> Metrics:
    """Executes one optimizer step towards the tokens of the batch, whoever sampled them.

    Raises TrainingError like `update_policy`.
    """
    models.updates += 1
    weights = imitation_weights(batch, aggregation)
    learnt = models.deal(
        [
            Imitate(part.batch, weights.of(part.tokens), batch.num_tokens)
            for part in models.policy.parts(batch)
        ]
    )
    return {f"sft/{name}": value for name, value in learnt.items()}


@dataclass(frozen=True, slots=True)
class ScorePart:
    """Scores the rank's part of a batch. Returns the scores of all parts on rank 0."""

    by: Scorer
    batch: Batch
    temperature: float

    def on(self, models: Models) -> list[Scores]:
        model = _scorer(models, self.by)
        scores = model.compute_logprobs(self.batch, temperature=self.temperature)
        return models.policy.ranks.gather(scores)


@dataclass(frozen=True, slots=True)
class ValuePart:
    """Computes the critic's values of the rank's part of a batch, as `ScorePart`."""

    batch: Batch

    def on(self, models: Models) -> list[Tensor]:
        assert models.critic is not None
        return models.policy.ranks.gather(models.critic.compute_values(self.batch))


@dataclass(frozen=True, slots=True)
class TrainPolicy:
    """The rank's part of one optimizer step of the policy."""

    batch: Batch
    weights: StepWeights
    expected: int
    """Number of tokens that all ranks train together."""
    temperature: float
    version: int

    def on(self, models: Models) -> Metrics:
        policy, algorithm, batch = models.policy, models.algorithm, self.batch
        loss = algorithm.loss(batch, self.weights, version=self.version)
        return train_part(
            policy,
            batch,
            lambda micros: policy.accumulate(
                micros,
                batch,
                loss,
                temperature=self.temperature,
                entropy_grad=algorithm.config.entropy_coefficient > 0,
            ),
            self.expected,
        )


@dataclass(frozen=True, slots=True)
class TrainCritic:
    """The rank's part of one optimizer step of the critic."""

    batch: Batch
    weights: StepWeights
    expected: int
    """As in `TrainPolicy`."""

    def on(self, models: Models) -> Metrics:
        critic, batch = models.critic, self.batch
        assert critic is not None
        loss = models.algorithm.value_loss(batch, self.weights)
        return train_part(
            critic,
            batch,
            lambda micros: critic.accumulate(micros, batch, loss),
            self.expected,
        )


@dataclass(frozen=True, slots=True)
class Imitate:
    """The rank's part of one optimizer step towards recorded text."""

    batch: Batch
    weights: StepWeights
    expected: int
    """As in `TrainPolicy`."""

    def on(self, models: Models) -> Metrics:
        policy, batch = models.policy, self.batch
        loss = imitation_loss(self.weights)
        return train_part(
            policy,
            batch,
            lambda micros: policy.accumulate(micros, batch, loss, temperature=1.0),
            self.expected,
        )


def _scorer(models: Models, name: Scorer) -> FrozenModel:
    model: FrozenModel | None
    match name:
        case "policy":
            model = models.policy
        case "base":
            model = AdaptersOff(models.policy)
        case "reference":
            model = models.reference
        case "teacher":
            model = models.teacher
    assert model is not None
    return model


def _scores(
    models: Models, model: FrozenModel, name: Scorer, batch: Batch, temperature: float
) -> Scores:
    parts = model.parts(batch)
    found = models.deal([ScorePart(name, part.batch, temperature) for part in parts])
    return Scores(
        joined(parts, [scores.logprobs for scores in found]),
        joined(parts, [scores.entropy for scores in found]),
    )


def _optimizer_steps(
    models: Models,
    model: Trainable,
    batch: Batch,
    part_step: Callable[[Batch, StepWeights, int], TrainPolicy | TrainCritic],
    generator: torch.Generator,
) -> Iterator[Metrics]:
    """Executes one optimizer step per mini-batch; yields its metrics."""
    for sequences in models.algorithm.mini_batches(batch, generator):
        weights = models.algorithm.weigh(batch, sequences)
        expected = int(torch.isin(batch.sequence, sequences).sum())
        yield models.deal(
            [
                part_step(part.batch, weights.of(part.tokens), expected)
                for part in model.parts(batch, sequences.tolist())
            ]
        )


def _mean_over_steps(steps: Iterator[Metrics]) -> Metrics:
    sums: dict[str, float] = defaultdict(float)
    count = 0
    for metrics in steps:
        for name, value in metrics.items():
            sums[name] += value
        count += 1
    return {name: value / count for name, value in sums.items()} | {"update_steps": float(count)}
