"""Line plots and histograms as inline SVG, without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 26, 28
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706")

Points = Sequence[tuple[float, float]]


def line_plot(title: str, series: Mapping[str, Points], *, markers: bool = False) -> str:
    """A plot with one line per series over the steps. Points that are not finite are left out."""
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
    if len(shown) > 1:
        parts.append(_legend(list(shown)))
    for index, points in enumerate(shown.values()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(_x(x, x0, x1), _y(y, y0, y1)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        if markers or len(points) == 1:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places
            ]
    return _svg(parts)


def histogram(title: str, counts: Mapping[str, float]) -> str:
    """A plot with one bar per label, in the given order."""
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
        _text(LEFT - 6, HEIGHT - BOTTOM, _number(y0, y1), "end"),
        _text(LEFT - 6, TOP + 8, _number(y1, y0), "end"),
    ]
    if x0 is not None and x1 is not None:
        parts.append(_text(LEFT, HEIGHT - 10, f"{x0:g}", "start"))
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 10, f"step {x1:g}", "end"))
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    """The legend, in the row below the frame, between the labels of the first and the last step."""
    parts, x = [], LEFT + 24.0
    for name, colour in zip(names, COLOURS, strict=False):
        parts.append(f'<rect x="{x}" y="{HEIGHT - 15}" width="10" height="3" fill="{colour}"/>')
        parts.append(_text(x + 14, HEIGHT - 10, name, "start"))
        x += 24 + 6.2 * len(name)  # 6.2: average width of a character of 11 px
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values; it includes 0 if all values are equal."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    return min(low, 0.0), max(high, 0.0) if high else 1.0


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _number(value: float, other: float) -> str:
    """The value in a short form that differs from that of `other`, the other end of the axis."""
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    short = f"{value:.3g}"
    return short if short != f"{other:.3g}" else f"{value:.7g}"
