"""Numbers as people read them: one form of each kind in the console, the page and the report.

`client/format.js` of the page has the same forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NARROW = 0.01
"""Within this of none and of all a share has one decimal, so that 99.6 % does not look like all."""


def percent(share: float | None) -> str:
    """Example: percent(0.4375) == "44 %", percent(0.996) == "99.6 %"."""
    if share is None or not math.isfinite(share):
        return "\N{EN DASH}"
    near = 0 < share < NARROW or 1 - NARROW < share < 1
    return f"{100 * share:.{1 if near else 0}f} %"


def points(difference: float) -> str:
    """In percentage points. Example: points(0.4375) == "+44" """
    return f"{100 * difference:+.0f}".replace("-", "\N{MINUS SIGN}")


def interval(bounds: Sequence[float]) -> str:
    """Of shares. Example: interval((0.25, 0.48)) == "25 % to 48 %"."""
    return " to ".join(map(percent, bounds))


def signed(value: float) -> str:
    """Example: signed(-0.031) == "−0.031"."""
    return f"{value:+.3g}".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """Example: duration(300) == "5 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
