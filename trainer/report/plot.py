"""Line plots and histograms as inline SVG: no script, no network, readable when printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 26, 28
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706")

Points = Sequence[tuple[float, float]]


def line_plot(title: str, series: Mapping[str, Points], *, markers: bool = False) -> str:
    """One line per series over the step. Points that are not finite are left out."""
    shown = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    every = [point for points in shown.values() for point in points]
    if not every:
        return ""
    x0, x1 = _span([x for x, _ in every])
    y0, y1 = _span([y for _, y in every])
    parts = [_frame(title), _axis_labels(x0, x1, y0, y1)]
    for index, (name, points) in enumerate(shown.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(_x(x, x0, x1), _y(y, y0, y1)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        if markers or len(points) == 1:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            ]
        if len(shown) > 1:
            parts.append(_legend(index, name, colour))
    return _svg(parts)


def histogram(title: str, counts: Mapping[str, float]) -> str:
    """One bar per label, in the order given."""
    if not counts:
        return ""
    top = max([*counts.values(), 1e-9])
    step = (WIDTH - LEFT - RIGHT) / len(counts)
    parts = [_frame(title), _axis_labels(None, None, 0.0, top)]
    for index, (label, count) in enumerate(counts.items()):
        height = (HEIGHT - TOP - BOTTOM) * count / top
        x, y = LEFT + index * step, HEIGHT - BOTTOM - height
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{max(step - 4, 1):.1f}" '
            f'height="{height:.1f}" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(x + step / 2, HEIGHT - 10, label, "middle"))
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        + "".join(parts)
        + "</svg>"
    )


def _frame(title: str) -> str:
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    box = f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" class="frame"/>'
    return box + f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>'


def _axis_labels(x0: float | None, x1: float | None, y0: float, y1: float) -> str:
    parts = [
        _text(LEFT - 6, HEIGHT - BOTTOM, _number(y0), "end"),
        _text(LEFT - 6, TOP + 8, _number(y1), "end"),
    ]
    if x0 is not None and x1 is not None:
        parts.append(_text(LEFT, HEIGHT - 10, _number(x0), "start"))
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 10, f"step {_number(x1)}", "end"))
    return "".join(parts)


def _legend(index: int, name: str, colour: str) -> str:
    y = TOP + 14 + 14 * index
    line = f'<rect x="{LEFT + 8}" y="{y - 5}" width="10" height="3" fill="{colour}"/>'
    return line + _text(LEFT + 22, y, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.0 if high > low else max(abs(high), 1.0) * 0.5
    return low - pad, high + pad


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _number(value: float) -> str:
    return f"{value:.3g}"
