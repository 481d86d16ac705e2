"""vLLM's side of the `nccl` backend: vLLM's own, which fails if an update is not complete.

Runs inside vLLM's worker processes, in place of the class that vLLM registers under this name.
Invariants: an update is applied completely, or fails with an error that its caller receives
(`vllm_reload.py`); it ends if the trainer, or another worker, is lost meanwhile (`nccl_abort.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from trainer.weight_sync.nccl_abort import is_aborted, watched
from trainer.weight_sync.segment import Named
from trainer.weight_sync.vllm_reload import Reload


class CheckedNcclEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's worker side of `nccl`, with the checks of `Reload`."""

    _reload: Reload | None = None

    def start_weight_update(self) -> None:
        """Nothing: the reload begins when the weights are there."""

    def receive_weights(self, update_info: Any) -> None:
        """
        Raises:
            ValueError: the update does not contain every weight, or only a part of one.
            RuntimeError: the trainer or another worker was lost.
        """
        communicator = self.model_update_group
        if communicator is None:
            raise RuntimeError("no trainer has connected: POST /init_weight_transfer_engine first")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        self._reload = Reload(self.model, self.model_config, self.device)
        try:
            with watched(communicator):
                packed_nccl_broadcast_consumer(
                    iterator=(
                        (name, (shape, getattr(torch, dtype))) for name, dtype, shape in described
                    ),
                    group=communicator,
                    src=0,
                    post_unpack_func=partial(self._load_part, communicator, self._reload),
                    buffer_size_bytes=self.packed_buffer_size_bytes,
                    num_buffers=self.packed_num_buffers,
                    device=self.device,
                )
            self._reload.check()
        except BaseException:
            # Ends the reload, so that the next update starts with complete layers.
            self.finish_weight_update()
            raise

    def _load_part(self, communicator: Any, reload: Reload, tensors: list[Named]) -> None:
        """Loads what the current stream receives. Each message has one of two streams, and a layer
        may be in two messages, so that each is complete before anything reads it, and read before
        its memory is used for another."""
        stream = torch.cuda.current_stream()
        stream.synchronize()
        if is_aborted(communicator):
            raise RuntimeError("the update was ended, because a member of its group was lost")
        reload.load_part(tensors)
        stream.synchronize()

    def finish_weight_update(self) -> None:
        if self._reload is not None:
            self._reload.finish()
            self._reload = None
