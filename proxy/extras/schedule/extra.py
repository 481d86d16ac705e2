"""The extra `scheduling`: sessions take turns where the engines' KV caches cannot hold all."""

from __future__ import annotations

from functools import partial
from typing import Self

from proxy.config import ProxyConfig
from proxy.extra import Core, Extra
from proxy.extras.schedule.admission import CacheAdmission

WAITS_S = (0.1, 1, 10, 30, 60, 120, 300, 600)
"""Bounds of the histogram of waits; the longest is twice the default of `max_wait_s`."""


class Scheduling(Extra):
    """Gives the router a `CacheAdmission`."""

    @classmethod
    def of(cls, config: ProxyConfig) -> Self | None:
        return cls()

    async def open(self, core: Core) -> None:
        waited = core.metrics.histogram(
            "admission_wait_seconds",
            "Seconds that calls waited for room in an engine's cache, by how the wait ended",
            WAITS_S,
            "end",
        )

        def on_admitted(waited_s: float, overdue: bool) -> None:
            waited.labels("overdue" if overdue else "admitted").observe(waited_s)

        config = core.config
        admission = CacheAdmission(
            config.scheduling, share=1 / config.workers, on_admitted=on_admitted
        )
        for name, words, value in (
            ("admitted_sessions", "Sessions that have room in an engine's cache", "seated"),
            ("paused_calls", "Calls that wait for room in an engine's cache", "waiting"),
        ):
            core.metrics.gauge(name, words, partial(getattr, admission.schedule, value))
        core.router.admit_by(admission)
