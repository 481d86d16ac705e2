"""What the micro-batches of an optimizer step report, read from the device once, at its end.

Invariant: the sums are those of the numbers read one by one, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.token_loss import Metrics
from trainer.policy.trainable import summed
from trainer.transfers import read

_FINITE = ""
"""The name, beside those of the metrics, of whether all losses of the micro-batch are finite."""


class LateMetrics:
    """Example:
    late = LateMetrics()
    for micro in micros:
        late.add({"loss": …}, losses, partial(raise_not_finite, batch, targets, …))
    metrics = late.sums()
    """

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Tensor]] = []
        self._refusals: list[Callable[[], Any]] = []

    def add(self, metrics: Mapping[str, Tensor], losses: Tensor, refuse: Callable[[], Any]) -> None:
        """A micro-batch's contributions, scalars, and its losses `[M]`; `refuse` raises an error if
        they are not finite."""
        self._rows.append({**metrics, _FINITE: torch.isfinite(losses).all()})
        self._refusals.append(refuse)

    def sums(self) -> Metrics:
        """The sum of each metric. Raises what the first micro-batch with a loss that is not finite
        refuses with."""
        rows = read(self._rows)
        for row, refuse in zip(rows, self._refusals, strict=True):
            if not row.pop(_FINITE):
                refuse()
        return summed(rows)
