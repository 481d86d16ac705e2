"""Compares evaluations of the same tasks: differences of success, paired by task.

Invariant: a difference is taken over the tasks that both evaluations judged, because other tasks
may be easier or harder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BOOTSTRAP_SAMPLES = 2000
"""Resamples of a bootstrap; its interval then varies by about 1 % of its width."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Example: Difference(tasks=64, mean=0.12, interval=(0.03, 0.21), better=11, worse=4)"""

    tasks: int
    """Number of tasks that both judged."""
    mean: float
    """Mean over tasks of the second's share of successes minus the first's; NaN without tasks."""
    interval: tuple[float, float]
    """95 % percentile interval of `mean`, by the bootstrap over tasks."""
    better: int
    """Number of tasks with a larger share in the second."""
    worse: int

    @property
    def p_value(self) -> float:
        """Two-sided, of the exact sign test on the tasks whose share differs; with one trial per
        task this is McNemar's exact test. 1 without such a task."""
        changed, fewer = self.better + self.worse, min(self.better, self.worse)
        tail = sum(math.comb(changed, n) for n in range(fewer + 1))
        return min(1.0, 2 * tail / (1 << changed))


def bootstrap_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of values of independent tasks (Efron 1979, Annals of
    Statistics 7); NaN without values. The resamples are the same in every call."""
    if not values:
        return (np.nan, np.nan)
    rng, given = np.random.default_rng(seed), np.asarray(values, float)
    drawn = rng.integers(0, len(given), (BOOTSTRAP_SAMPLES, len(given)))
    means: npt.NDArray[np.float64] = given[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Difference:
    """Each argument maps a task to its share of successes."""
    both = [(first[task], second[task]) for task in first if task in second]
    gains = [b - a for a, b in both]
    mean = sum(gains) / len(gains) if gains else float("nan")
    return Difference(
        tasks=len(both),
        mean=mean,
        interval=bootstrap_interval(gains),
        better=sum(gain > 0 for gain in gains),
        worse=sum(gain < 0 for gain in gains),
    )
