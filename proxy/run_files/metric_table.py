"""What each metric of a run is: its unit, how it is computed, what is normal, what else means.

The entries are in `metrics.yaml` beside this file; `docs/metrics.md`, `agentic-train explain` and
the page have them from here. Invariant: every metric that a run writes has an entry
(`tests/trainer/run/test_metric_table.py`); those of a user's own functions have none.

In a run with several policies, each policy's metrics are under `policies/NAME/`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

ENTRIES = Path(__file__).with_name("metrics.yaml")


class Metric(BaseModel):
    """Example: metric_of("actor/clip_fraction").verl is "actor/pg_clipfrac" """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """As it is written. What stands in brackets differs: `staleness/tokens_at_[age]`."""
    unit: str
    what: str
    """What it is and how it is computed."""
    normal: str = ""
    """What a healthy run shows."""
    bad: str = ""
    """What other values mean, and what to do."""
    verl: str = ""
    trl: str = ""
    """Its name there; empty: they have none."""


@functools.cache
def metric_groups() -> Mapping[str, tuple[Metric, ...]]:
    """Title → its metrics, in the order of the page."""
    entries = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    return {
        title: tuple(Metric(name=name, **entry) for name, entry in metrics.items())
        for title, metrics in entries.items()
    }


def metric_of(name: str) -> Metric | None:
    """The entry of a metric, also of one of several policies; None: it has none."""
    own = re.sub(r"^policies/[^/]+/", "", name)
    metrics = [metric for group in metric_groups().values() for metric in group]
    exact = next((metric for metric in metrics if metric.name == own), None)
    return exact or next(
        (metric for metric in metrics if _pattern(metric.name).fullmatch(own)), None
    )


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\[\w+\\\]", "[^/]+", re.escape(name)))


def metric_lines(metric: Metric) -> Iterator[str]:
    """What a reader is told about it, line by line."""
    yield f"{metric.name} ({metric.unit}): {metric.what}"
    if metric.normal:
        yield f"normal: {metric.normal}"
    if metric.bad:
        yield f"otherwise: {metric.bad}"
    if others := other_names(metric):
        yield f"the same elsewhere: {others}"


def other_names(metric: Metric) -> str:
    """Its names in other trainers."""
    named = {"verl": metric.verl, "TRL": metric.trl}
    return ", ".join(f"{name} in {where}" for where, name in named.items() if name)


def ends_with(name: str) -> list[Metric]:
    """The metrics whose last parts these are: `grad_norm` is that of the actor, the critic, …"""
    metrics = (metric for group in metric_groups().values() for metric in group)
    return [metric for metric in metrics if f"/{metric.name}".endswith(f"/{name}")]
