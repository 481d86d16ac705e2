"""Makes vLLM take this machine for one with an H200, as far as it decides in Python.

Runs in the environment of `make gpu-environment`, with the stand-ins of the driver (`driver.py`) on
LD_LIBRARY_PATH. NVML then reports the card, and vLLM's platform, arguments, configurations and
classes of models take their CUDA branches. What asks the card itself is answered here.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any


def pose() -> None:
    """To be called before anything else imports vLLM."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    triton: Any = import_module("triton.backends.nvidia.driver")
    triton.CudaDriver.is_active = staticmethod(lambda: True)  # asks torch for a device
    platform: Any = import_module("vllm.platforms.cuda").CudaPlatform
    platform.num_compute_units = classmethod(lambda _cls, device_id=0: 132)
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()  # it would import vLLM again
