"""A policy loss: the ratio has an upper bound alone (`algorithm.loss`).

All arguments are `[M]`: log-probabilities with gradient, those before the update, advantages, and
the index of each token's sequence. The result is the loss of each token.
"""

from __future__ import annotations

import torch


def bounded(
    logprobs: torch.Tensor,
    prox: torch.Tensor,
    advantages: torch.Tensor,
    sequence: torch.Tensor,
    bound: float = 2.0,
) -> torch.Tensor:
    ratio = (logprobs - prox).clamp(max=20).exp()
    return -ratio.clamp(max=bound) * advantages
