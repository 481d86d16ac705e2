"""What a loss function is: scores of a micro-batch's tokens → weighted losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss function's answer for the `M` tokens of a micro-batch."""

    losses: Tensor
    """`[M]`, already weighted: their sum over all micro-batches is the loss of the step."""
    metrics: Mapping[str, Tensor]
    """Contributions that add up, over all micro-batches, to the step's metric."""


LossFunction = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""`(logprobs [M], entropy [M], targets [M]) → TokenLoss`; `targets` index the batch's columns."""
ValueLossFunction = Callable[[Tensor, Tensor], TokenLoss]
"""`(values [M], targets [M]) → TokenLoss`."""
