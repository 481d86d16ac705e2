"""Makes vLLM take this machine for one with an H200, as far as it decides in Python.

Import this first, in the environment of `make gpu-environment`, with the stand-ins of the driver on
LD_LIBRARY_PATH (`driver.py`): NVML then reports the card, and vLLM's platform, arguments, configurations
and classes of models take their CUDA branches. What asks the card itself is answered here.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from triton.backends.nvidia.driver import CudaDriver

CudaDriver.is_active = staticmethod(lambda: True)  # asks torch whether there is a device

import vllm.platforms.cuda
from vllm.model_executor.models import registry

vllm.platforms.cuda.CudaPlatform.num_compute_units = classmethod(lambda _cls, device_id=0: 132)
registry._run_in_subprocess = lambda inspect: inspect()  # which would import vLLM again
