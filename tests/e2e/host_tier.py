"""vLLM's host tier of the KV cache on a machine without a GPU, for tests and benchmarks.

vLLM's own `CPUOffloadingSpec` refuses a CPU. This one has vLLM's scheduler, manager, metrics and
eviction, and replaces only the copies between GPU and host by copies within the host's memory. vLLM
loads it by `spec_module_path` (`tiered_server`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class RamWorker(OffloadingWorker):
    """Copies blocks between the engine's cache and tensors of the same layout."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int, load_s: float) -> None:
        self._load_s = load_s
        (refs,) = caches.group_data_refs  # one group of layers, as in models without windows
        self._engine = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        self._host = [
            torch.zeros((chunks, each.shape[1]), dtype=torch.int8) for each in self._engine
        ]
        self._finished: list[tuple[float, TransferResult]] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._host, dst_spec, 0.0)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._host, src_spec, self._engine, dst_spec, self._load_s)

    def get_finished(self) -> list[TransferResult]:
        now = time.monotonic()
        done = [result for at, result in self._finished if at <= now]
        self._finished = [each for each in self._finished if each[0] > now]
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All copies have been made already."""

    def _copy(
        self,
        job_id: int,
        sources: Iterable[torch.Tensor],
        source: LoadStoreSpec,
        targets: Iterable[torch.Tensor],
        target: LoadStoreSpec,
        more_s: float,
    ) -> bool:
        if not isinstance(source, BlockIDsLoadStoreSpec) or not isinstance(
            target, BlockIDsLoadStoreSpec
        ):
            return False
        began = time.monotonic()
        size_bytes = 0
        for from_blocks, to_blocks in zip(sources, targets, strict=True):
            blocks = from_blocks[torch.as_tensor(source.block_ids)]
            to_blocks[torch.as_tensor(target.block_ids)] = blocks
            size_bytes += blocks.nbytes
        now = time.monotonic()
        result = TransferResult(job_id, True, size_bytes, now - began + more_s)
        self._finished.append((now + more_s, result))
        return True


class RamOffloadingSpec(CPUOffloadingSpec):
    """Needs blocks of the host tier that are as large as those of the engine, vLLM's default."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            load_s = float(self.extra_config.get("load_s", 0.0))
            self._worker = RamWorker(kv_caches, self.num_chunks, load_s)
        return self._worker
