"""One policy update from one batch: epochs × mini-batches × micro-batches."""

from __future__ import annotations

from collections import defaultdict

import torch

from trainer.algorithms import Algorithm
from trainer.batch import Batch
from trainer.errors import TrainingError
from trainer.policy import Policy
from trainer.token_loss import Metrics


def update_policy(
    policy: Policy,
    algorithm: Algorithm,
    batch: Batch,
    *,
    temperature: float,
    version: int,
    generator: torch.Generator,
) -> Metrics:
    """Trains on the batch, whose advantages are computed; metrics are means over optimizer steps.

    `version` is that of the weights before the update, `generator` draws the mini-batches. When
    no group has a signal (and only such train) no step is made: `update_steps` is 0.
    Raises TrainingError where a token of a mini-batch was not trained exactly once.
    """
    sums: dict[str, float] = defaultdict(float)
    steps = 0
    entropy_grad = algorithm.config.entropy_coefficient > 0
    for sequences in algorithm.mini_batches(batch, generator):
        loss = algorithm.loss(batch, sequences, version=version)
        trained = 0
        for micro in policy.pack(batch, sequences.tolist()):
            part = policy.forward_backward(
                micro, batch, loss, temperature=temperature, entropy_grad=entropy_grad
            )
            trained += len(micro.targets)
            for name, value in part.items():
                sums[name] += value
        expected = int(torch.isin(batch.sequence, sequences).sum())
        if trained != expected:
            raise TrainingError(f"{trained} tokens were trained of the mini-batch's {expected}")
        for name, value in policy.step().items():
            sums[name] += value
        steps += 1
    metrics = {name: value / steps for name, value in sums.items()}
    if "kl_loss" in metrics:
        algorithm.adapt_kl(metrics["kl_loss"])
    return metrics | {"update_steps": float(steps)}
