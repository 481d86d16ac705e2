"""Types of loss functions: from the scores of a micro-batch's tokens to weighted losses and
metrics.

Shapes: `N` trained tokens of a batch, `M` of them in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The losses of the `M` tokens of a micro-batch."""

    losses: Tensor
    """`[M]`, weighted losses: their sum over all micro-batches is the loss of the step."""
    metrics: Mapping[str, Tensor]
    """Name of a metric → the micro-batch's contribution; the step's metric is the sum of them."""


@dataclass(frozen=True, slots=True, eq=False)
class StepWeights:
    """What the losses of one optimizer step take from the whole batch. `N` may be the tokens of one
    rank's part, which has the same values as in the whole batch."""

    weights: Tensor
    """`[N]` float32, weight of the token's loss; 0 for a token that the step does not train."""
    share: Tensor
    """`[N]` float32, weight of the token in the metrics, which are means over the step's tokens."""
    kept: Tensor
    """`[N]` bool: False for tokens that a rejection over the whole batch drops."""
    kl_coefficient: float = 0.0

    def of(self, tokens: Tensor) -> StepWeights:
        """Those of the tokens with these indices."""
        chosen = {name: getattr(self, name)[tokens] for name in ("weights", "share", "kept")}
        return replace(self, **chosen)


LossFunction = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""`(logprobs [M], entropy [M], targets [M]) → TokenLoss`; `targets` index the batch's columns."""
ValueLossFunction = Callable[[Tensor, Tensor], TokenLoss]
"""`(values [M], targets [M]) → TokenLoss`."""
