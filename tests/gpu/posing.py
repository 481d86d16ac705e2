"""Makes vLLM take this machine for one with an H200, as far as it decides in Python.

Runs in the environment of `benchmarks.install gpu`, with the stand-ins of the driver (`driver.py`)
on LD_LIBRARY_PATH. NVML then reports the card, and vLLM's platform, arguments, configurations and
classes of models take their CUDA branches. What asks the card itself is answered here.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

UUID = "00000000-0000-0000-0000-000000000000"
"""As torch writes it, without NVML's prefix `GPU-`."""
H200 = SimpleNamespace(
    name="NVIDIA H200",
    uuid=UUID,
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150120431616,
    L2_cache_size=52428800,
    shared_memory_per_block_optin=232448,
    is_integrated=False,
)
"""What torch reports of the card, as far as vLLM asks."""


def pose() -> None:
    """To be called before anything else imports vLLM."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cuda: Any = import_module("torch").cuda
    cuda.get_device_properties = lambda *_: H200
    cuda.get_device_capability = lambda *_: (H200.major, H200.minor)
    cuda.get_device_name = lambda *_: H200.name
    triton: Any = import_module("triton.backends.nvidia.driver").CudaDriver
    triton.is_active = staticmethod(lambda: True)  # asks torch for a device
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    triton.get_current_target = lambda _self: target
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()  # it would import vLLM again
