"""Registers the `shm` weight-transfer backend in every vLLM process (entry point
`vllm.general_plugins`).

With it, `--weight-transfer-config '{"backend": "shm"}'` makes a server take its weights from the
trainer's shared memory. Importing this module costs nothing: the engine is loaded when it is used.
"""

from __future__ import annotations

import contextlib


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load plug-ins more than once in a process, and refuses a second registration.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "shm", "trainer.weight_sync.vllm_engine", "SharedMemoryEngine"
        )
