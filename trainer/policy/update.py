"""One optimizer step of the policy or its critic: a rank's micro-batches, then the step.

Invariant: each optimizer step trains each of its tokens exactly once, on one of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch

from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.optimizer import GradientError
from trainer.packing import MicroBatch
from trainer.policy.critic import Critic
from trainer.policy.policy import Policy

ForwardBackward = Callable[[MicroBatch], Metrics]


def train_part(
    model: Policy | Critic, batch: Batch, forward_backward: ForwardBackward, expected: int
) -> Metrics:
    """Trains on the rank's part of a mini-batch, whose parts have `expected` tokens together.
    Returns the metrics of all parts. All ranks call this together.

    Raises TrainingError if a token of the mini-batch was not trained exactly once.
    """
    sums: dict[str, float] = defaultdict(float)
    for micro in model.pack(batch):
        sums["trained_tokens"] += len(micro.targets)
        for name, value in forward_backward(micro).items():
            sums[name] += value
    metrics = model.ranks.sum_metrics(sums)
    if metrics["trained_tokens"] != expected:
        trained = metrics["trained_tokens"]
        raise TrainingError(f"{trained:.0f} of the mini-batch's {expected} tokens were trained")
    try:
        return metrics | model.step()
    except GradientError as error:
        raise TrainingError(f"{_culprit(model, batch, forward_backward)}: {error}") from error


def _culprit(model: Policy | Critic, batch: Batch, forward_backward: ForwardBackward) -> str:
    """The first rollout and turn whose own gradient is not finite."""
    if model.ranks.size > 1:
        return "one of the rollouts (train with trainer.ranks=1 to see which one)"
    for sequence in range(len(batch.sequences)):
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
