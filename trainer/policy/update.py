"""One optimizer step of the policy or its critic: a rank's micro-batches, then the step.

Invariant: each optimizer step trains each of its tokens exactly once, on one of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trainer.algorithms.token_loss import Metrics
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.optimizer import GradientError
from trainer.policy.late_metrics import LateMetrics
from trainer.policy.trainable import Trainable
from trainer.rows.packing import MicroBatch

Accumulate = Callable[[Sequence[MicroBatch]], LateMetrics]
"""Adds the gradients of micro-batches; returns their contributions to the metrics."""


def train_part(model: Trainable, batch: Batch, accumulate: Accumulate, expected: int) -> Metrics:
    """Trains on the rank's part of a mini-batch, whose parts have `expected` tokens together.
    Returns the metrics of all parts. All ranks call this together.

    Raises TrainingError if a token of the mini-batch was not trained exactly once.
    """
    micros = model.pack(batch)
    trained = sum(len(micro.targets) for micro in micros if not micro.reads_only)
    metrics = {"trained_tokens": float(trained)}
    late = accumulate(micros)
    alone = model.ranks.size == 1
    if not alone:
        metrics = model.ranks.sum_metrics(metrics | late.sums())
    if metrics["trained_tokens"] != expected:
        count = f"{metrics['trained_tokens']:.0f}"
        raise TrainingError(f"{count} of the mini-batch's {expected} tokens were trained")
    try:
        return metrics | model.step(late if alone else None)
    except GradientError as error:
        raise TrainingError(f"{_culprit(model, batch, accumulate)}: {error}") from error


def _culprit(model: Trainable, batch: Batch, accumulate: Accumulate) -> str:
    """The first rollout and turn whose own gradient is not finite."""
    if model.ranks.size > 1:
        return "one of the rollouts (train with trainer.ranks=1 to see which one)"
    for sequence in range(len(batch.sequences)):
        (micro,) = model.pack(batch, [sequence])
        turns = batch.turns[micro.targets]
        for turn in torch.unique(turns):
            own = turns == turn
            part = replace(micro, targets=micro.targets[own], predictors=micro.predictors[own])
            accumulate([part])
            finite = model.stepper.gradient_is_finite()
            model.stepper.clear()
            if not finite:
                return batch.name(int(part.targets[0]))
    return "all rollouts together, although none of them alone"
