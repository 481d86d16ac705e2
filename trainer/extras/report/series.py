"""The curves of a run of any length, in a bounded number of points.

Invariant: memory and size do not depend on the number of steps. Of each stretch of steps the lowest
and the highest value are kept, so that no peak is lost, and the first and the last value of the
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from proxy.run_files.json_lines import every_line

MAX_STRETCHES = 128
"""Stretches of steps per metric: about one for each 3 pixels of a curve."""
MAX_METRICS = 200
LARGEST = 1e300

Point = tuple[int, float]


class Series:
    """The points of one metric. Example: series.add(12, 0.5); list(series.points())"""

    def __init__(self) -> None:
        self._stretches: list[list[Point]] = []
        """Of each stretch its lowest and its highest point."""
        self._size, self._filled = 1, 0
        """Number of points of a full stretch, and of the last one."""
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, step: int, value: float) -> None:
        self._last = point = (step, value)
        self._first = self._first or point
        if self._stretches and self._filled < self._size:
            self._stretches[-1] = _extremes([*self._stretches[-1], point])
            self._filled += 1
            return
        if len(self._stretches) == MAX_STRETCHES:
            self._stretches = [
                _extremes(self._stretches[n] + self._stretches[n + 1])
                for n in range(0, MAX_STRETCHES, 2)
            ]
            self._size *= 2
        self._stretches.append([point])
        self._filled = 1

    def points(self) -> Iterator[Point]:
        """In the order of their steps."""
        kept = [point for stretch in self._stretches for point in stretch]
        ends = {point for point in (self._first, self._last) if point is not None}
        kept.extend(ends.difference(kept))
        yield from sorted(kept, key=lambda point: point[0])


def _extremes(points: list[Point]) -> list[Point]:
    low, high = (of(points, key=lambda point: point[1]) for of in (min, max))
    return [low] if low == high else sorted((low, high))


class SeenMetrics:
    """What the report says of `metrics.jsonl`, which is read once."""

    def __init__(self, path: Path) -> None:
        self.series: dict[str, Series] = {}
        self.left_out: set[str] = set()
        """Names of further metrics, of which at most MAX_METRICS are kept."""
        self.last_step = 0
        self.trained_steps = 0
        self.without_signal = 0
        """Number of steps."""
        self.first_without_signal: int | None = None
        self.stalest: Point | None = None
        for line in every_line(path):
            self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**53:
            return
        self.last_step = max(self.last_step, step)
        for name, value in line.items():
            if name in ("step", "time") or not is_number(value):
                continue
            if name in self.series or len(self.series) < MAX_METRICS:
                self.series.setdefault(name, Series()).add(step, value)
            elif len(self.left_out) < MAX_METRICS:
                self.left_out.add(name)
        if is_number(without := line.get("signal/steps_without")):
            self.trained_steps += 1
            if without > 0:
                self.without_signal += 1
                if self.first_without_signal is None:
                    self.first_without_signal = step
        if is_number(age := line.get("staleness/max")) and age > (self.stalest or (0, 0.0))[1]:
            self.stalest = (step, age)

    def ends(self, name: str) -> list[float]:
        """The first and the last value of a metric; one value if there are no others."""
        points = list(self.series[name].points()) if name in self.series else []
        return [value for _, value in (*points[:1], *points[1:][-1:])]


def is_number(value: Any) -> TypeGuard[int | float]:
    """False also for NaN, infinity, and integers that no float can hold."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST
    )
