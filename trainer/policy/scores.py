"""What a model gives for the trained tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of every trained token: `[N]` float32 each, on the CPU.

    Example: Scores(logprobs=[-0.1 -2.3 -0.7], entropy=[0.4 1.9 0.8])
    """

    logprobs: Tensor
    entropy: Tensor
