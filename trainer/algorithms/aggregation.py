"""How much each trained token weighs in the loss.

Invariant: weights are made once for all the tokens of an optimizer step, so their denominators are
global over micro-batches and ranks by construction, and the loss is a plain weighted sum. They do
not depend on what a correction masks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm", "rollout_mean"
]


def token_weights(
    aggregation: Aggregation,
    sequence: Tensor,
    rollout: Tensor,
    *,
    max_tokens: int | None = None,
) -> Tensor:
    """`[N]` weights of the tokens of one step; `sequence`, `rollout` `[N]` say whose they are.

    - token_mean: `1 / N` (DAPO, arXiv 2503.14476).
    - sequence_mean_token_mean: `1 / (S n_s)` (GRPO, GSPO).
    - sequence_mean_token_sum_norm: `1 / (S · max_tokens)`, a constant (Dr.GRPO, arXiv 2503.20783).
    - rollout_mean: `1 / (R n_r)`: each rollout the same, however many sequences it became.
    """
    if not len(sequence):
        return torch.zeros(0)
    if aggregation == "token_mean":
        return torch.full((len(sequence),), 1 / len(sequence))
    if aggregation == "rollout_mean":
        return _mean_of_means(rollout)
    if aggregation == "sequence_mean_token_mean":
        return _mean_of_means(sequence)
    if max_tokens is None:
        raise ValueError("sequence_mean_token_sum_norm needs max_tokens")
    sequences = len(torch.unique(sequence))
    return torch.full((len(sequence),), 1 / (sequences * max_tokens))


def _mean_of_means(owner: Tensor) -> Tensor:
    owners, index, counts = torch.unique(owner, return_inverse=True, return_counts=True)
    weights: Tensor = 1 / (len(owners) * counts[index].float())
    return weights
