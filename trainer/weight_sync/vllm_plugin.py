"""Prepares every vLLM process for the trainer (entry point `vllm.general_plugins`): registers the
`shm` weight-transfer backend, and makes a vLLM on CPU return routed experts.

With it, `--weight-transfer-config '{"backend": "shm"}'` makes a server take its weights from the
trainer's shared memory. Importing this module costs nothing: the engine is loaded when it is used.
"""

from __future__ import annotations

import contextlib

from trainer import cpu_routed_experts


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load plug-ins more than once in a process, and refuses a second registration.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "shm", "trainer.weight_sync.vllm_engine", "SharedMemoryEngine"
        )
    cpu_routed_experts.install()
