"""Prepares every vLLM process for the trainer (entry point `vllm.general_plugins`): registers the
weight-transfer backends `shm` and `gloo`, corrects how errors of several workers are read, makes
workers report in which types they hold weights, loads OLMo Hybrid, names shared memory after the
server's folder (so that it is removed with it), and makes a vLLM on CPU return routed experts,
prefill the prompts of seeded requests in parts, and compute images whose tokens see each other.

With it, `--weight-transfer-config '{"backend": "shm"}'` makes a server take its weights from the
trainer's shared memory. Importing this module costs nothing: an engine is loaded when it is used.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import shared_memory
from pathlib import Path

from proxy.machine.swept_folder import LOCK, memory_prefix
from proxy.settings.late_section import load_extra
from trainer.weight_sync import cpu_image_mask, cpu_seeds, cpu_without_images, vllm_responses


def register() -> None:
    from trainer.weight_sync import vllm_dtypes

    register_backends()
    register_models()
    name_shared_memory(Path(os.environ.get("VLLM_RPC_BASE_PATH", "")))
    vllm_responses.install()
    vllm_dtypes.install()
    load_extra("trainer.extras.experts.cpu_routed_experts:install")()
    cpu_without_images.install()
    cpu_seeds.install()
    cpu_image_mask.install()


def register_models() -> None:
    """In place of vLLM's own. A class is imported when a model of it is loaded."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(
        "OlmoHybridForCausalLM", "trainer.extras.hybrids.vllm_olmo_hybrid:OlmoHybridForCausalLM"
    )


def name_shared_memory(folder: Path) -> None:
    """Names what Python's `SharedMemory` creates from now on after the folder of one of our
    servers. Its default names show no owner, and a killed process leaves its memory behind."""
    if not (folder / LOCK).is_file():
        return
    prefix = "/" + memory_prefix(folder)
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 8  # type: ignore[attr-defined]


def register_backends() -> None:
    """For vLLM's workers, and `gloo` for the trainer's process, too."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    # vLLM may load plug-ins more than once in a process, and refuses a second registration.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "shm", "trainer.weight_sync.vllm_engine", "SharedMemoryEngine"
        )
        WeightTransferEngineFactory.register_engine(
            "gloo", "trainer.extras.gloo.engine", "GlooEngine"
        )
        # vLLM's own, which does not check that an update is complete, is already registered.
        WeightTransferEngineFactory._registry.pop("nccl", None)
        WeightTransferEngineFactory.register_engine(
            "nccl", "trainer.weight_sync.nccl_engine", "CheckedNcclEngine"
        )
        WeightTransferTrainerFactory.register_engine(
            "gloo", "trainer.extras.gloo.trainer", "GlooTrainer"
        )
