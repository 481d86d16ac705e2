"""Updates the policy or its critic from one batch: epochs, mini-batches and micro-batches.

Invariant: each mini-batch trains each of its tokens exactly once, on one of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trainer.algorithms import Algorithm
from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.imitation import imitation_loss
from trainer.algorithms.token_loss import Metrics
from trainer.algorithms.value_losses import explained_variance
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.optimizer import GradientError
from trainer.packing import MicroBatch
from trainer.policy.critic import Critic
from trainer.policy.policy import Policy

ForwardBackward = Callable[[MicroBatch], Metrics]


def update_policy(
    policy: Policy,
    algorithm: Algorithm,
    batch: Batch,
    *,
    temperature: float,
    version: int,
    generator: torch.Generator,
) -> Metrics:
    """Trains on a batch that has advantages; returns metrics, which are means over optimizer steps.

    `version` is the version of the weights before the update; `generator` draws the mini-batches.
    If the algorithm trains on none of the groups, no step is executed and `update_steps` is 0.
    Raises TrainingError if a token of a mini-batch was not trained exactly once.
    """
    entropy_grad = algorithm.config.entropy_coefficient > 0

    def start(sequences: Tensor) -> ForwardBackward:
        loss = algorithm.loss(batch, sequences, version=version)
        return lambda micro: policy.forward_backward(
            micro, batch, loss, temperature=temperature, entropy_grad=entropy_grad
        )

    metrics = _update(policy, algorithm, batch, start, generator)
    if "kl_loss" in metrics:
        algorithm.adapt_kl(metrics["kl_loss"])
    return metrics


def update_critic(
    critic: Critic, algorithm: Algorithm, batch: Batch, *, generator: torch.Generator
) -> Metrics:
    """Trains the critic towards the batch's value targets, in the algorithm's mini-batches.

    Raises TrainingError like `update_policy`, and if there are no values or targets.
    """

    def start(sequences: Tensor) -> ForwardBackward:
        loss = algorithm.value_loss(batch, sequences)
        return lambda micro: critic.forward_backward(micro, batch, loss)

    metrics = _update(critic, algorithm, batch, start, generator)
    if batch.values is not None and batch.value_targets is not None:
        metrics["explained_variance"] = explained_variance(batch.values, batch.value_targets)
    return metrics


def update_by_imitation(policy: Policy, batch: Batch, aggregation: Aggregation) -> Metrics:
    """One optimizer step towards the tokens of the batch; returns its metrics.

    Raises TrainingError like `update_policy`.
    """
    loss = imitation_loss(batch, aggregation)
    sequences = torch.arange(len(batch.sequences))
    return _mini_batch(
        policy,
        batch,
        sequences,
        lambda micro: policy.forward_backward(micro, batch, loss, temperature=1.0),
    )


def _update(
    model: Policy | Critic,
    algorithm: Algorithm,
    batch: Batch,
    start: Callable[[Tensor], ForwardBackward],
    generator: torch.Generator,
) -> Metrics:
    sums: dict[str, float] = defaultdict(float)
    steps = 0
    for sequences in algorithm.mini_batches(batch, generator):
        for name, value in _mini_batch(model, batch, sequences, start(sequences)).items():
            sums[name] += value
        steps += 1
    return {name: value / steps for name, value in sums.items()} | {"update_steps": float(steps)}


def _mini_batch(
    model: Policy | Critic, batch: Batch, sequences: Tensor, forward_backward: ForwardBackward
) -> Metrics:
    sums: dict[str, float] = defaultdict(float)
    for micro in model.pack(batch, sequences.tolist()):
        sums["trained_tokens"] += len(micro.targets)
        for name, value in forward_backward(micro).items():
            sums[name] += value
    metrics = model.ranks.sum_metrics(sums)
    expected = int(torch.isin(batch.sequence, sequences).sum())
    if metrics["trained_tokens"] != expected:
        trained = metrics["trained_tokens"]
        raise TrainingError(f"{trained:.0f} of the mini-batch's {expected} tokens were trained")
    try:
        return metrics | model.step()
    except GradientError as error:
        raise TrainingError(
            f"{_culprit(model, batch, sequences, forward_backward)}: {error}"
        ) from error


def _culprit(
    model: Policy | Critic, batch: Batch, sequences: Tensor, forward_backward: ForwardBackward
) -> str:
    """The first rollout and turn whose own gradient is not finite."""
    if model.ranks.size > 1:
        return "one of the rollouts (train with trainer.ranks=1 to see which one)"
    for sequence in sequences.tolist():
        (micro,) = model.pack(batch, [sequence])
        turns = batch.turns[micro.targets]
        for turn in torch.unique(turns):
            own = turns == turn
            part = replace(micro, targets=micro.targets[own], predictors=micro.predictors[own])
            forward_backward(part)
            finite = model.stepper.gradient_is_finite()
            model.stepper.clear()
            if not finite:
                return batch.name(int(part.targets[0]))
    return "all rollouts together, although none of them alone"
