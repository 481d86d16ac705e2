"""How sure a number is: intervals of shares, of means, and of differences between them.

Whatever reports of a run compares (evaluation, verdict, report) computes it here, so that no two of
them disagree. Invariant: equal values give equal intervals, in every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np
import numpy.typing as npt

SIGNIFICANT = 0.05
"""Two-sided level of tests, as of intervals of 95 %."""
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

    @property
    def is_significant(self) -> bool:
        """Whether both the sign test and the interval exclude that nothing changed."""
        low, high = self.interval
        return self.p_value < SIGNIFICANT and (low > 0 or high < 0)


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


Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); (0, 1) without a sample."""
    if n == 0:
        return (0.0, 1.0)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    middle, scale = share + Z_95**2 / (2 * n), 1 + Z_95**2 / n
    return (max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def change_of_means(
    first: Sequence[float], last: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """The mean of `last` minus that of `first`, and its 95 % interval by Welch's t (1947), which
    does not suppose equal variances. Each has at least two values."""
    change = fmean(last) - fmean(first)
    parts = [variance(each) / len(each) for each in (first, last)]
    total = sum(parts)
    if total == 0:
        return change, (change, change)
    freedom = total**2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (first, last), strict=True)
    )
    half = _t_95(freedom) * math.sqrt(total)
    return change, (change - half, change + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of at least two independent values, by Student's t."""
    mean = fmean(values)
    half = _t_95(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return mean - half, mean + half


FEW = 5.0
"""Degrees of freedom from which on the expansion of `_t_95` is exact to 0.1 %."""


@functools.lru_cache(maxsize=1024)
def _t_95(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t: its expansion in 1/ν (Fisher and Cornish 1960), or
    for few degrees of freedom the angle θ below which cos^(ν-1) has 95 % of its integral over
    [0, π/2]; t = √ν tan θ."""
    z, v = Z_95, freedom
    if v < FEW:
        whole = math.sqrt(math.pi) * math.gamma(v / 2) / (2 * math.gamma((v + 1) / 2))
        low, high = 0.0, math.pi / 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if _of_cos(v - 1, middle) < 0.95 * whole else (low, middle)
        return math.sqrt(v) * math.tan(low)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _of_cos(power: float, end: float, parts: int = 200) -> float:
    """∫ cos^power from 0 to `end`, by Simpson's rule."""
    heights: list[float] = [math.cos(end * n / parts) ** power for n in range(parts + 1)]
    return (
        end
        / (3 * parts)
        * (heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]))
    )
