"""What a model gives for the trained tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of every trained token: `[N]` float32 each, on the CPU.

    Example: Scores(logprobs=[-0.1 -2.3 -0.7], entropy=[0.4 1.9 0.8])
    """

    logprobs: Tensor
    entropy: Tensor


def collected(found: Sequence[tuple[Tensor, Tensor, Tensor]], count: int) -> Scores:
    """The scores of `count` tokens from `(indices, log-probabilities, entropies)` of micro-batches,
    of which the first are on the CPU, and the others are read from their device by one copy."""
    scores = torch.zeros(2, count)
    if found:
        targets, *both = (torch.cat(column) for column in zip(*found, strict=True))
        scores[:, targets] = torch.stack(both).to(scores.device)
    return Scores(*scores)
