"""Whether this machine has an NVIDIA GPU that a program can use: its driver answers and lists one.

`make` asks it before anything is installed, so it uses nothing but the standard library and the
driver's own library (NVML). A program such as `nvidia-smi` on PATH says nothing: images have it
without a driver, and it fails where the driver does not answer.
"""

from __future__ import annotations

import ctypes
import sys

LIBRARY = "libnvidia-ml.so.1"


def gpu_count() -> int:
    """The number of GPUs that the driver lists; 0 where there is no driver or it fails."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
        if nvml.nvmlInit_v2() != 0:
            return 0
        count = ctypes.c_uint(0)
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library; a library without these functions
        return 0
    return 0 if failed else count.value


if __name__ == "__main__":
    sys.exit(gpu_count() == 0)
