"""Differences between evaluations are paired by task, with intervals that cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proxy.run_files.intervals import bootstrap_interval, paired_difference


def test_only_tasks_that_both_judged_are_compared() -> None:
    difference = paired_difference({"a": 0.0, "b": 0.5, "c": 1.0}, {"b": 1.0, "c": 1.0, "d": 0.0})
    assert (difference.tasks, difference.better, difference.worse) == (2, 1, 0)
    assert difference.mean == pytest.approx(0.25)
    assert 0.0 <= difference.interval[0] <= 0.25 <= difference.interval[1] <= 0.5
    assert math.isnan(paired_difference({"a": 1.0}, {"b": 1.0}).mean)


def test_interval_covers_the_mean_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.normal(0.3, 1.0, 60).tolist(), seed=trial)
        covered += low <= 0.3 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5)


def test_p_value_is_that_of_the_exact_sign_test() -> None:
    def p_value(better: int, worse: int) -> float:
        first = {f"b{n}": 0.0 for n in range(better)} | {f"w{n}": 1.0 for n in range(worse)}
        second = {name: 1.0 - share for name, share in first.items()}
        return paired_difference(first | {"same": 1.0}, second | {"same": 1.0}).p_value

    assert p_value(0, 0) == p_value(1, 0) == p_value(3, 3) == 1.0
    assert p_value(5, 0) == 2 / 2**5
    assert p_value(1, 8) == p_value(8, 1) == 2 * (1 + 9) / 2**9
    assert p_value(3000, 100) == 0.0
