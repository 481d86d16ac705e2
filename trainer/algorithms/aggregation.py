"""The weight of each trained token in the loss.

Invariant: the weights of all tokens of an optimizer step are computed together. Their denominators
are therefore global over micro-batches and ranks, and the loss is a plain weighted sum. The weights
do not depend on which tokens a correction masks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.part import MAX_COUNT, NamedPart, Parts


class Aggregation(NamedPart, ABC):
    """The weights with which the losses of tokens are summed to the loss of a step."""

    @abstractmethod
    def weights(self, sequence: Tensor, rollout: Tensor) -> Tensor:
        """`[N]`: the weights of the tokens of one step. `sequence` and `rollout`, both `[N]`, are
        the indices of each token's sequence and rollout.
        """


class TokenMean(Aggregation):
    """`1 / N`: every token weighs the same. DAPO, arXiv 2503.14476."""

    name: Literal["token_mean"] = "token_mean"

    def weights(self, sequence: Tensor, rollout: Tensor) -> Tensor:
        return torch.full((len(sequence),), 1 / max(1, len(sequence)))


class SequenceMeanTokenMean(Aggregation):
    """`1 / (S n_s)`: every sequence weighs the same. GRPO (arXiv 2402.03300), GSPO."""

    name: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"

    def weights(self, sequence: Tensor, rollout: Tensor) -> Tensor:
        return _mean_of_means(sequence)


class SequenceMeanTokenSum(Aggregation):
    """`1 / (S · max_tokens)`, a constant. Dr.GRPO, arXiv 2503.20783."""

    name: Literal["sequence_mean_token_sum_norm"] = "sequence_mean_token_sum_norm"
    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    """The constant, in tokens: the maximum length of one generation."""

    def weights(self, sequence: Tensor, rollout: Tensor) -> Tensor:
        sequences = max(1, len(torch.unique(sequence)))
        return torch.full((len(sequence),), 1 / (sequences * self.max_tokens))


class RolloutMean(Aggregation):
    """`1 / (R n_r)`: every rollout weighs the same, however many sequences it consists of."""

    name: Literal["rollout_mean"] = "rollout_mean"

    def weights(self, sequence: Tensor, rollout: Tensor) -> Tensor:
        return _mean_of_means(rollout)


def _mean_of_means(owner: Tensor) -> Tensor:
    owners, index, counts = torch.unique(owner, return_inverse=True, return_counts=True)
    weights: Tensor = 1 / (len(owners) * counts[index].float())
    return weights


AGGREGATIONS = Parts[Aggregation](
    Aggregation, (TokenMean, SequenceMeanTokenMean, SequenceMeanTokenSum, RolloutMean)
)
"""Registry of the aggregations for `algorithm.aggregation`."""
