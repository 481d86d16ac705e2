"""New weights into running engines, with a version, without a restart.

Invariant: when `push` returns, every engine serves exactly the weights given, says so in the
version of each token that it samples from then on, and holds no key or value of older weights.
Requests in flight are kept: tokens sampled before carry the old version, those after the new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.errors import WeightSyncError
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named
from trainer.weight_sync.transports import Backend, Transport, open_transport


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Example: SyncReport(version=7, paused_s=0.031, total_s=0.034)"""

    version: int
    paused_s: float
    """How long the engines sampled nothing."""
    total_s: float


class WeightSync:
    """Blocking: run it in a thread beside an event loop. One `push` at a time."""

    def __init__(self, control: EngineControl, backend: Backend = "shm") -> None:
        self.control = control
        self.transport: Transport = open_transport(backend, control)

    def push(self, weights: Iterable[Named], version: int) -> SyncReport:
        """
        Raises:
            WeightSyncError: an engine refused, or does not report the new version. The engines
                stay paused then: they hold no complete set of weights.
        """
        started = time.perf_counter()
        self.control.next_version = version
        self.transport.stage(weights)
        self.control.pause()
        paused = time.perf_counter()
        self.transport.send()
        self.control.reset_prefix_cache()
        self._expect_version(version)
        self.control.resume()
        now = time.perf_counter()
        return SyncReport(version, paused_s=now - paused, total_s=now - started)

    def verify(self, ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> float:
        """Largest mean |Δ log p| of any engine against the trainer's `logprobs` of `ids[1:]`.

        The engine keeps weights fused and packed for its kernels, so that no checksum of its
        memory equals one of the trainer's; what it computes from them is what is compared.

        Raises:
            WeightSyncError: it exceeds `tolerance`.
        """
        worst = 0.0
        for url, served in zip(self.control.urls, self.control.prompt_logprobs(ids), strict=True):
            gaps = [abs(ours - theirs) for ours, theirs in zip(logprobs, served, strict=True)]
            mean = sum(gaps) / len(gaps)
            if not mean <= tolerance:
                raise WeightSyncError(
                    f"{url} does not serve the trainer's weights: mean |Δ log p| is {mean:.2e} on "
                    f"{len(gaps)} probe tokens, at most {tolerance:.0e} is expected "
                    "(engine.verify_tolerance); check that engine.dtype equals model.compute_dtype"
                )
            worst = max(worst, mean)
        return worst

    def close(self) -> None:
        self.transport.close()
        self.control.close()

    def _expect_version(self, version: int) -> None:
        for url, served in zip(self.control.urls, self.control.weight_versions(), strict=True):
            if served != str(version):
                raise WeightSyncError(
                    f"{url} reports weight version {served!r} after the update to {version}"
                )
