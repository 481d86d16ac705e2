"""Types of loss functions: from the scores of a micro-batch's tokens to weighted losses and
metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The losses of the `M` tokens of a micro-batch."""

    losses: Tensor
    """`[M]`, weighted losses: their sum over all micro-batches is the loss of the step."""
    metrics: Mapping[str, Tensor]
    """Name of a metric → the micro-batch's contribution; the step's metric is the sum of them."""


LossFunction = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""`(logprobs [M], entropy [M], targets [M]) → TokenLoss`; `targets` index the batch's columns."""
ValueLossFunction = Callable[[Tensor, Tensor], TokenLoss]
"""`(values [M], targets [M]) → TokenLoss`."""
