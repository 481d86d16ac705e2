"""What the micro-batches of an optimizer step report, read from the device once, at its end: after
the optimizer has changed the weights, or has not, because a number is not finite.

Invariant: the sums are those of the numbers read one by one, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.token_loss import Metrics
from trainer.transfers import read

_FINITE = ""
"""The name, beside those of the metrics, of whether all losses of the micro-batch are finite."""


class LateMetrics:
    """Example:
    late = LateMetrics()
    for micro in micros:
        late.add({"loss": …}, losses, partial(raise_not_finite, batch, targets, …))
    metrics = stepper.step(late)
    """

    def __init__(self, known: Metrics | None = None) -> None:
        """`known`: sums that were read already."""
        self._known = known or {}
        self._rows: list[Mapping[str, Tensor]] = []
        self._refusals: list[Callable[[], Any]] = []

    def add(self, metrics: Mapping[str, Tensor], losses: Tensor, refuse: Callable[[], Any]) -> None:
        """A micro-batch's contributions, scalars, and its losses `[M]`; `refuse` raises an error if
        they are not finite."""
        self._rows.append({**metrics, _FINITE: torch.isfinite(losses).all()})
        self._refusals.append(refuse)

    def all_finite(self, finite: Tensor) -> Tensor:
        """Whether this scalar is True and all losses so far are finite; not read."""
        for row in self._rows:
            finite = finite & row[_FINITE]
        return finite

    def sums(self, more: Mapping[str, Tensor] | None = None) -> Metrics:
        """The sum of each metric, and `more` scalars. Raises what the first micro-batch with a loss
        that is not finite refuses with."""
        *rows, others = read([*self._rows, more or {}])
        for row, refuse in zip(rows, self._refusals, strict=True):
            if not row.pop(_FINITE):
                refuse()
        return self._known | summed(rows) | others


def summed(contributions: Iterable[Metrics]) -> Metrics:
    """The sum of each metric over micro-batches."""
    sums: dict[str, float] = defaultdict(float)
    for metrics in contributions:
        for name, value in metrics.items():
            sums[name] += value
    return dict(sums)
