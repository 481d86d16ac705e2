"""An advantage: the return minus the median of its group (`algorithm.advantage`).

`returns.centred` applies a baseline to the returns of all turns and tokens.
"""

from __future__ import annotations

import torch

from trainer.algorithms.returns import Returns


def above_median(returns: Returns) -> torch.Tensor:
    return returns.centred(_medians)


def _medians(values: torch.Tensor, group: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    medians = torch.empty_like(values)
    for each in group.unique():
        medians[group == each] = values[group == each].median()
    return medians
