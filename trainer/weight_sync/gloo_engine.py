"""vLLM's side of the `gloo` backend: receives the trainer's weights by broadcast, in host memory.

Runs inside vLLM's worker processes, of which an engine may have several. Invariants: an update is
applied completely, or fails with an error that its caller receives (`vllm_reload.py`). It fails if
the digest differs from the trainer's. No weight is loaded before every worker of the engine has
received all of them, so that an engine whose trainer was lost has its old weights entirely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferUpdateInfo,
)

from trainer.weight_sync.gloo_group import GlooGroup, receive
from trainer.weight_sync.segment import Named
from trainer.weight_sync.vllm_reload import ReloadingEngine


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    """How the workers of an engine join the group."""

    master_address: str
    master_port: int
    rank_offset: int
    """The rank of the engine's first worker."""
    world_size: int
    """Number of workers of all engines, and the trainer."""
    bucket_bytes: int
    """Size of the messages, which the trainer chooses."""


class GlooEngine(ReloadingEngine[GlooInit, NCCLWeightTransferUpdateInfo]):
    """vLLM's side: receives all tensors in host memory before the first one is loaded."""

    init_info_cls = GlooInit
    update_info_cls = NCCLWeightTransferUpdateInfo
    _group: GlooGroup | None = None
    _bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()  # a trainer that has ended, or has other engines now
        self._bucket_bytes = init_info.bucket_bytes
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup.join(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + worker,
            init_info.world_size,
        )

    def start_weight_update(self) -> None:
        """Nothing: a trainer that is lost after this call leaves the engine as it was."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Returns when the model has the new weights.

        Raises:
            RuntimeError: this worker, or another one of this engine, has not received them; none
                loads them.
            ValueError: they are not those that were sent, or not every weight of the model.
        """
        try:
            tensors = self._received(update_info)
        except BaseException:
            _all_workers(False)
            raise
        if not _all_workers(True):
            raise RuntimeError(
                "another worker of this engine has not received the weights; all keep the old ones"
            )
        super().start_weight_update()
        try:
            self._load_tensors(tensors)
        finally:  # also if it is refused, so that the next update starts with complete layers
            super().finish_weight_update()

    def finish_weight_update(self) -> None:
        """Nothing: see `receive_weights`."""

    def _received(self, update_info: NCCLWeightTransferUpdateInfo) -> list[Named]:
        if self._group is None:
            raise ValueError("no trainer has connected: POST /init_weight_transfer_engine first")
        try:
            return receive(
                self._group,
                update_info.names,
                update_info.dtype_names,
                update_info.shapes,
                self._bucket_bytes,
            )
        except BaseException:
            self.shutdown()  # or the other members would wait for this one
            raise

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None


def _all_workers(received: bool) -> bool:
    """Whether every worker of this engine calls this function with True."""
    agreed = torch.tensor(int(received))
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(agreed)
