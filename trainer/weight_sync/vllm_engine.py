"""vLLM's side of the `shm` backend: loads the trainer's weights from shared memory.

Runs inside vLLM's worker processes. Invariant: an update is applied completely, or fails with an
error that its caller receives (`vllm_reload.py`). It fails if the digest differs from the
trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from trainer.weight_sync.segment import SegmentReader, Written
from trainer.weight_sync.vllm_reload import ReloadingEngine


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: each update says where its memory is."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the new weights are: the file, its size, and the digest of its content."""

    path: str
    size_bytes: int
    digest: str


class SharedMemoryEngine(ReloadingEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """vLLM's side of the `shm` backend: loads new weights from shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self._reader = SegmentReader()

    def _load(self, update_info: SharedMemoryUpdate) -> None:
        written = Written(update_info.path, update_info.size_bytes, update_info.digest)
        self._load_tensors(self._reader.receive(written))

    def shutdown(self) -> None:
        self._reader.close()
