"""vLLM's side of the `gloo` backend: receives the trainer's weights by broadcast, in host memory.

Runs inside vLLM's worker processes, of which an engine may have several. A thread of its own joins
the group, receives all weights and stages them (`vllm_staging.py`), while the worker samples. Only
this thread uses the group, because leaving it waits for an operation in progress; vLLM's own
collectives have other groups, and only the worker's main thread uses those.

Invariants: an update is applied completely, or fails with an error that its caller receives
(`vllm_reload.py`). It fails if the digest differs from the trainer's. No weight is loaded before
every worker of the engine has received all of them, so that an engine whose trainer was lost has
its old weights entirely, and still samples. A twin that is not adopted is discarded: only that
frees its memory.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from trainer.extras.gloo.group import Description, GlooGroup, ReceivedWeights, receive
from trainer.weight_sync.vllm_staging import StagingEngine, log_unreceived, log_unstaged, words
from trainer.weight_sync.vllm_twin import Twin


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """How the workers of an engine join the group; or, once they have joined it, the weights that
    the trainer sends next."""

    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    """The rank of the engine's first worker."""
    world_size: int = 0
    """Number of workers of all engines, and the trainer."""
    bucket_bytes: int = 0
    """Size of the messages, which the trainer chooses."""
    weights: Description | None = None


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The digest of the received weights that are to be served."""

    digest: str


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights that every worker of every engine has received."""

    received: ReceivedWeights
    """In host memory; without tensors, if the twin has them."""
    size_bytes: int
    twin: Twin | None


class GlooEngine(StagingEngine[GlooInit, GlooUpdate]):
    """vLLM's side: receives all tensors in host memory before the first one is loaded."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._group: GlooGroup | None = None
        self._bucket_bytes = 0
        self._staged: Future[StagedWeights] | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Joins the group, or begins to receive weights and returns at once."""
        if (unused := self._staged) is not None:
            self._staged = None
            self._thread.submit(lambda: _discard(unused.result()))
        if init_info.weights is None:
            self._thread.submit(self._join, init_info).result()
        else:
            self._staged = self._thread.submit(self._stage, init_info.weights)
            self._staged.add_done_callback(log_unreceived)

    def _load(self, update_info: GlooUpdate) -> None:
        """Returns when the model has the staged weights.

        Raises:
            RuntimeError: this worker, or another one of this engine, has not received them; none
                loads them.
            ValueError: they are not those that were sent, or not every weight of the model.
        """
        try:
            staged = self._taken(update_info.digest)
        except BaseException:
            _all_workers(False)
            raise
        try:
            if not _all_workers(True):
                raise RuntimeError(
                    "another worker of this engine has not received the weights; all keep the old "
                    "ones"
                )
        except BaseException:
            self._thread.submit(_discard, staged)
            raise
        if staged.twin is not None:
            self._adopt(staged.twin)
        else:
            self._load_unstaged(staged.received.tensors, staged.size_bytes)
        self.finish_weight_update()  # now, so that a trainer that is lost leaves complete layers

    def shutdown(self) -> None:
        self._staged = None
        self._thread.submit(self._leave)

    def _taken(self, digest: str) -> StagedWeights:
        """The staged weights, once."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise RuntimeError("no weights have been sent since the last update")
        found = staged.result()
        if found.received.digest != digest:
            self._thread.submit(_discard, found)
            raise ValueError(f"the weights received last have digest {found.received.digest}")
        return found

    def _join(self, init_info: GlooInit) -> None:
        self._leave()  # a trainer that has ended, or has other engines now
        self._bucket_bytes = init_info.bucket_bytes
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup.join(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + worker,
            init_info.world_size,
        )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def _stage(self, weights: Description) -> StagedWeights:
        if self._group is None:
            raise ValueError("no trainer has connected: POST /init_weight_transfer_engine first")
        try:
            received = receive(self._group, weights, self._bucket_bytes)
            staged, reason = self._loaded(received)
            try:
                log_unstaged(reason)
                self._group.reasons(reason)
            except BaseException:
                _discard(staged)
                raise
        except BaseException:
            self._leave()  # or the other members would wait for this one
            raise
        return staged

    def _loaded(self, received: ReceivedWeights) -> tuple[StagedWeights, str]:
        """The weights in a twin, or as they are, and why."""
        size = sum(tensor.nbytes for _, tensor in received.tensors)
        unloaded = StagedWeights(received, size, None)
        if reason := self._why_unstaged(size):
            return unloaded, reason
        try:
            twin = self._filled(received.tensors)
        except Exception as error:  # noqa: BLE001 (of the loader of any model)
            return unloaded, words(error)
        return StagedWeights(ReceivedWeights([], received.digest), size, twin), ""


def _discard(staged: StagedWeights) -> None:
    if staged.twin is not None:
        staged.twin.discard()


def _all_workers(received: bool) -> bool:
    """Whether every worker of this engine calls this function with True."""
    agreed = torch.tensor(int(received))
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(agreed)
