"""Curves of any length in a bounded number of points."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainer.extras.report.series import MAX_METRICS, MAX_STRETCHES, SeenMetrics, Series


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=1200))
def test_series_keeps_extremes_and_ends_in_order(values: list[float]) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    points = list(series.points())
    assert len(points) <= 2 * MAX_STRETCHES + 2
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert {min(values), max(values)} <= {value for _, value in points}
    assert points[0] == (0, values[0])
    assert points[-1] == (len(values) - 1, values[-1])
    assert all(values[step] == value for step, value in points)


def test_short_series_is_kept_whole() -> None:
    series = Series()
    for step in range(MAX_STRETCHES):
        series.add(step, step % 7)
    assert list(series.points()) == [(step, step % 7) for step in range(MAX_STRETCHES)]


def test_the_ends_of_a_long_run_are_its_first_and_its_last_value(tmp_path: Path) -> None:
    values = [0.5, 0.9, 0.1, *[0.3] * (8 * MAX_STRETCHES), 0.4]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert SeenMetrics(file).ends("loss") == [0.5, 0.4]


def test_values_that_are_no_numbers_are_skipped_and_names_are_bounded(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 1.5, "bad": "text", "none": None, "huge": 10**400, "flag": True},
        {"step": "2", "loss": 7.0},
        {"step": 10**400, "loss": 7.0},
        {"step": 3, "loss": float("nan")},
        {"step": 4} | {f"own/{n}": 1.0 for n in range(MAX_METRICS + 5)},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + 'not json\n{"step": 9')
    metrics = SeenMetrics(file)
    assert list(metrics.series["loss"].points()) == [(1, 1.5)]
    assert metrics.last_step == 4
    assert len(metrics.series) == MAX_METRICS
    assert len(metrics.left_out) == 6
