"""The loss of supervised fine-tuning: the negative log-likelihood of text that the policy did not
sample."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.token_loss import LossFunction, StepWeights, TokenLoss
from trainer.batch import Batch
from trainer.transfers import sent


def imitation_weights(batch: Batch, aggregation: Aggregation) -> StepWeights:
    """The weights of one optimizer step on the whole batch."""
    weights = aggregation.weights(batch.sequence, batch.rollout)
    share = torch.full_like(weights, 1 / max(1, batch.num_tokens))
    return StepWeights(weights, share, torch.ones_like(weights, dtype=torch.bool))


def imitation_loss(step: StepWeights) -> LossFunction:
    """`Σ_t weight_t · −log π_θ(t)` over the tokens of the batch."""

    def function(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
        def of(column: Tensor) -> Tensor:
            return sent(column[targets], logprobs.device)

        weighted = -of(step.weights) * logprobs
        metrics = {
            "loss": weighted.detach().sum(),
            "entropy": (of(step.share) * entropy.detach()).sum(),
        }
        return TokenLoss(weighted, metrics)

    return function
