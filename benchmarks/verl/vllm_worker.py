"""What verl runs inside vLLM's worker processes, for a vLLM on CPU.

verl loads new weights into the parameters that the model computes with. On CPU there are none: vLLM
packs linear weights for oneDNN when it has loaded them, and empties the parameters. Here the same
tensors, received from verl's sender, go through vLLM's reload, which packs them again. The class is
named in `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from trainer.weight_sync.vllm_reload import Reload


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(self, use_shm: bool = False, **_adapters: Any) -> None:
        """Loads all weights, or raises ValueError: some are missing."""
        received: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        # The sender reuses its buffer for the next bucket.
        receiver.receive_weights(
            lambda bucket, _last: received.extend((name, each.clone()) for name, each in bucket)
        )
        reload = Reload(self.model_runner.model, self.model_runner.model_config, self.device)
        try:
            reload.load(received)
        finally:
            reload.finish()
