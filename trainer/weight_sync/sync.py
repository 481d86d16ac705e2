"""Sends new weights and their version to running engines.

Invariant: when `push` returns, every engine serves exactly the given weights, reports their version
with each token that it samples from then on, and holds no keys or values of older weights. Requests
in flight continue: tokens sampled before the update carry the old version, later ones the new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer.engine import Backend
from trainer.errors import WeightSyncError
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.dtypes import Dtypes, engine_dtypes, rounded
from trainer.weight_sync.segment import Named
from trainer.weight_sync.transports import Shapes, Transport, open_transport


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Example: SyncReport(version=7, paused_s=0.031, total_s=0.034, size_bytes=2_400_000)"""

    version: int
    paused_s: float
    """Seconds during which the engines did not sample."""
    total_s: float
    size_bytes: int
    """Size of the tensors that were sent."""


class WeightSync:
    """Sends weights to engines, one `push` at a time. Its methods block: call them in a thread if
    an event loop is running."""

    def __init__(
        self,
        control: EngineControl,
        backend: Backend = "shm",
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        *,
        tower: bool = False,
    ) -> None:
        """`device` holds the weights that will be sent, among them those of a `tower`."""
        self.control = control
        self._tower = tower
        self.transport: Transport = open_transport(backend, control, device)
        self._dtypes: Dtypes | None = None
        """In which types weights are sent; None: the engines have not been asked."""

    def push(
        self, weights: Iterable[Named], version: int, shapes: Shapes | None = None
    ) -> SyncReport:
        """Sends the weights to every engine and resumes sampling.

        `shapes`: see `Transport.stage`. With them, each weight is sent in the type in which the
        engines hold it, which they are asked once; without them, as it is trained.

        Raises:
            WeightSyncError: an engine was lost while it staged the weights; the others go on with
                their old ones. Or it refused them, or does not report the new version; the engines
                then stay paused, because not all of them have a complete set of weights.
        """
        started = time.perf_counter()
        self.control.next_version = version
        sent, described = self._as_sent(weights, shapes)
        self.transport.stage(sent, described)
        self.control.pause()
        paused = time.perf_counter()
        # not beside `send`: it may resume the engines in between
        self.control.reset_caches(tower=self._tower)
        self.transport.send()
        self._expect_version(version)
        self.control.resume()
        now = time.perf_counter()
        return SyncReport(version, now - paused, now - started, sent.size_bytes)

    def verify(self, ids: Sequence[int], logprobs: Sequence[float], tolerance: float) -> float:
        """Compares every engine with the trainer's `logprobs` of `ids[1:]`. Returns the largest
        mean |Δ log p| of an engine.

        Log-probabilities are compared because the engine stores its weights fused and packed, so
        that checksums of the engine's and the trainer's memory would always differ.

        Raises:
            WeightSyncError: the mean |Δ log p| of an engine exceeds `tolerance`.
        """
        return verify_engines(self.control, ids, logprobs, tolerance)

    def close(self) -> None:
        self.transport.close()
        self.control.close()

    def _as_sent(
        self, weights: Iterable[Named], shapes: Shapes | None
    ) -> tuple[_Counted, Shapes | None]:
        if shapes is None:
            return _Counted(weights), None
        trained = shapes()
        if self._dtypes is None:
            self._dtypes = engine_dtypes(self.control, trained)
        dtypes = self._dtypes
        return _Counted(rounded(weights, dtypes)), lambda: list(rounded(trained, dtypes))

    def _expect_version(self, version: int) -> None:
        for url, served in zip(self.control.urls, self.control.weight_versions(), strict=True):
            if served != str(version):
                raise WeightSyncError(
                    f"{url} reports weight version {served!r} after the update to {version}"
                )


def verify_engines(
    control: EngineControl,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tolerance: float,
    *,
    model: str | None = None,
) -> float:
    """As `WeightSync.verify`; `model` is the adapter that is compared, None: the weights."""
    worst = 0.0
    for url, served in zip(control.urls, control.prompt_logprobs(ids, model), strict=True):
        gaps = [abs(ours - theirs) for ours, theirs in zip(logprobs, served, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= tolerance:
            raise WeightSyncError(
                f"{url} does not serve the trainer's weights: mean |Δ log p| is {mean:.2e} on "
                f"{len(gaps)} probe tokens, but at most {tolerance:.0e} is expected "
                "(engine.verify_tolerance); check that engine.dtype equals model.compute_dtype"
            )
        worst = max(worst, mean)
    return worst


class _Counted:
    """The weights; counts their bytes as they are read."""

    def __init__(self, weights: Iterable[Named]) -> None:
        self._weights = weights
        self.size_bytes = 0

    def __iter__(self) -> Iterator[Named]:
        for name, tensor in self._weights:
            self.size_bytes += tensor.nbytes
            yield name, tensor
