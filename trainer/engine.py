"""Section `engine`: the vLLM servers of a run, their settings, and how they get the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import Field, field_validator

from proxy.engines.vllm_platform import EnginePlatform, version
from proxy.engines.vllm_server import VllmConfig
from proxy.settings.reaching import Restarts
from proxy.settings.section import Common
from trainer.errors import ConfigError
from trainer.policy.model_config import ModelConfig, load_settings
from trainer.policy.rounding import EXACT, Limits, later_limit, rounding_limits

Backend = Literal["shm", "nccl", "gloo"]
"""How weights are sent to engines."""
GPUS_OF_AN_ENGINE = "--tensor-parallel-size"
SHORT = MappingProxyType(
    {
        "-tp": GPUS_OF_AN_ENGINE,
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-pcp": "--prefill-context-parallel-size",
        "-n": "--nnodes",
        "-r": "--node-rank",
    }
)
"""vLLM's short names of arguments."""
NOT_DIVIDED = ("pipeline-parallel", "data-parallel", "prefill-context-parallel")
"""Beginnings of the arguments that divide a server in ways in which it gets no weights."""
HOST_TIER = "--kv-offloading-size"
"""GiB of the machine's memory in which an engine keeps what its KV cache has no room for."""
RESET_CONNECTORS = (None, "OffloadingConnector", "SimpleCPUOffloadConnector")
"""vLLM's connectors that delete all keys and values with the prefix cache. Of one that cannot, vLLM
0.32 reports success, and loads keys and values of old weights after an update. None: that of
HOST_TIER."""
OWN_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "--device-ids": "engine.env.CUDA_VISIBLE_DEVICES",
        "--distributed-executor-backend": "cluster.engine_nodes",
        "--dtype": "engine.dtype",
        "--gpu-memory-utilization": "engine.gpu_memory_share",
        "--headless": "cluster.engine_nodes",
        "--master-addr": "cluster.engine_nodes",
        "--master-port": "cluster.engine_nodes",
        "--max-model-len": "engine.max_context_tokens",
        "--max-num-seqs": "engine.max_sequences",
        "--model": "model.path",
        "--nnodes": "cluster.engine_nodes",
        "--node-rank": "cluster.engine_nodes",
        "--weight-transfer-config": "engine.weight_transfer",
    }
)
"""Arguments that a run gives to vLLM itself → their keys. The plan of GPUs counts with the keys."""


class EnginesConfig(VllmConfig, Restarts):
    """Example: EnginesConfig(replicas=2, max_context_tokens=32768)"""

    urls: Common[tuple[str, ...]] = ()
    """URLs of running vLLM servers in development mode; empty: start `replicas` servers."""
    replicas: Common[int] = Field(1, ge=0)
    """Number of servers to start, each with the whole model; 0 only with relay workers."""
    nice: int = Field(10, ge=0, le=19)
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Type of the engine's weights and activations. `auto`: the same as `model.compute_dtype`; with
    any other type, the log-probabilities of trainer and engine differ at every token."""
    weight_transfer: Backend = "shm"
    """How weights are sent to engines: `shm` (shared memory) on one machine, also on one GPU that
    both use; `nccl` between GPUs; `gloo` over any network."""
    publish: str | None = None
    """URL of any file system of fsspec (s3://, gs://, a shared folder) at which each version of the
    weights is published, for relay workers with `--weights-url`; None: they keep theirs."""
    publish_full_every: int = Field(10, ge=1)
    """Every how many versions all weights are published, and not only what changed."""
    publish_timeout_s: float = Field(600.0, gt=0)
    """Seconds for which an update waits for relay workers. One that has not loaded the weights by
    then gets no calls until it has; if none has, the run ends."""
    verify: bool = True
    """Compare the engine's log-probabilities with the trainer's on a probe after each update."""
    verify_tolerance: float = Field(0.0, ge=0)
    """Maximum mean |Δ log p| between trainer and engine. 0: 1e-3 in float32, and after the first
    step 20 times that step's (at least 1e-5; without experts); in bfloat16, by the kinds of layers,
    0.06 (dense), 0.15 (linear attention) or 0.3 (experts) on sampled tokens, and 0.2, 0.3 or 0.5 on
    the probe, whose tokens are improbable (docs/models.md)."""

    @field_validator("weight_transfer", mode="before")
    @classmethod
    def _name_the_successor(cls, given: object) -> object:
        if given == "ipc":
            raise ValueError("ipc was removed, because it never worked; use shm, also on one GPU")
        return given

    @field_validator("args")
    @classmethod
    def _leave_the_runs_own(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for name, value in _named(args):
            if " " in name:
                raise ValueError(f"{name!r} is one argument; write the name and the value as two")
            if key := OWN_KEYS.get(name):
                raise ValueError(f"{name} is set by the run; use {key}")
            if name.removeprefix("--").startswith(NOT_DIVIDED) and value != "1":
                raise ValueError(
                    f"{name} {value}: an engine gets weights only if it is one server that is "
                    f"divided by {GPUS_OF_AN_ENGINE}; use that, or more engine.replicas"
                )
            if name == HOST_TIER and not _GIB.fullmatch(value):
                raise ValueError(f"{name} {value!r} is not a number of GiB")
            if name == "--kv-offloading-backend" and value != "native":
                raise ValueError(f"{name} {value}: {_NOT_RESET}; use native")
            if name.startswith("--kv-transfer-config"):
                _check_transfer(name, value)
            if name == GPUS_OF_AN_ENGINE and (not value.isdigit() or int(value) < 1):
                raise ValueError(f"{name} {value!r} is not a number of GPUs")
        return args

    @property
    def host_tier_gib(self) -> float:
        """The memory of the machine for each engine's host tier; 0: it has none."""
        sizes = [float(value) for name, value in _named(self.args) if name == HOST_TIER]
        return sizes[-1] if sizes else 0.0

    @property
    def tensor_parallel(self) -> int:
        """The number of GPUs of each engine."""
        sizes = [int(value) for name, value in _named(self.args) if name == GPUS_OF_AN_ENGINE]
        return sizes[-1] if sizes else 1

    def served_dtype(self, model: ModelConfig) -> str:
        """The type in which the engine serves this model."""
        return model.compute_dtype if self.dtype == "auto" else self.dtype

    def mismatch_tolerance(self, model: ModelConfig, first: float | None = None) -> float:
        """Maximum mean |Δ log p| of trainer and engine on tokens sampled from the same weights.
        `first`: what it was in the run's first step; None: this is the first."""
        limit = self.verify_tolerance or self._limits(model).sampled
        if self.verify_tolerance or first is None or not self._is_exact(model):
            return limit
        return min(limit, later_limit(model, first))

    def probe_tolerance(self, model: ModelConfig) -> float:
        """Maximum mean |Δ log p| of trainer and engine on the probe."""
        return self.verify_tolerance or self._limits(model).probe

    def _limits(self, model: ModelConfig) -> Limits:
        return EXACT if self._is_exact(model) else rounding_limits(model)

    def _is_exact(self, model: ModelConfig) -> bool:
        return model.compute_dtype == self.served_dtype(model) == "float32"


def is_latent(model: Path) -> bool:
    """Whether the checkpoint has multi-head latent attention: keys and values of a low rank."""
    return getattr(load_settings(model).get_text_config(), "kv_lora_rank", None) is not None


def check_platform(
    engine: EnginesConfig, model: ModelConfig, platform: EnginePlatform, *, gpus: bool | None
) -> None:
    """Checks that the servers which a run starts can be served by the installed vLLM. `gpus`:
    whether PyTorch finds GPUs where the servers run and may use them; None: that is not known.

    Raises:
        ConfigError: with what to do.
    """
    dtype = engine.served_dtype(model)
    if model.policy and dtype not in platform.adapter_dtypes:
        raise ConfigError(
            f"model.lora.update=adapter: vLLM on GPUs samples with adapters in "
            f"{' or '.join(platform.adapter_dtypes)} only, and the engines compute in {dtype}; set "
            "model.compute_dtype=bfloat16, or model.lora.update=merged"
        )
    if dtype not in platform.latent_dtypes and is_latent(model.path):
        raise ConfigError(
            f"model.compute_dtype={dtype}: vLLM on GPUs has multi-head latent attention, which "
            f"{model.path} needs, in {' or '.join(platform.latent_dtypes)} only; set that"
        )
    if engine.weight_transfer not in platform.transports:
        raise ConfigError(
            f"engine.weight_transfer={engine.weight_transfer}: vLLM on {platform.device.upper()}s "
            f"receives weights by {' or '.join(platform.transports)} only; set one of these"
        )
    if gpus is None or gpus == platform.plans_devices:
        return
    if gpus:
        raise ConfigError(
            f"vLLM {version()} is a build for CPUs, but PyTorch finds GPUs here; install the build "
            "for GPUs (make setup EXTRA=gpu), or train without them: trainer.device=cpu"
        )
    raise ConfigError(
        f"vLLM {version()} is a build for GPUs, but PyTorch finds no GPU here; check "
        "nvidia-smi and CUDA_VISIBLE_DEVICES, or install the build for CPUs (make setup EXTRA=cpu)"
    )


_GIB = re.compile(r"\d{1,9}(\.\d{1,9})?(e\d)?")
_NOT_RESET = (
    "after an update, the engine would load keys and values of the old weights, because an update "
    "cannot delete them there"
)


def _check_transfer(name: str, value: str) -> None:
    """Raises ValueError: keys and values are kept where an update does not reach them."""
    try:
        transfer = json.loads(value) if name == "--kv-transfer-config" else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(transfer, dict):
        raise ValueError(f"{name}: give its value as one JSON object, --kv-transfer-config '{{…}}'")
    connector = transfer.get("kv_connector")
    if connector not in RESET_CONNECTORS:
        raise ValueError(f"{name}: {connector}: {_NOT_RESET}; use {HOST_TIER} GIB")
    if (transfer.get("kv_connector_extra_config") or {}).get("secondary_tiers"):
        raise ValueError(f"{name}: secondary_tiers: {_NOT_RESET}; leave them out")


def _named(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arguments of vLLM's server by their whole names, with their values; as vLLM itself, it
    accepts `_` for `-`, `NAME=VALUE`, short names, and the beginning of a name."""
    for at, argument in enumerate(args):
        given, _, value = argument.partition("=")
        if given.startswith("-"):
            name = SHORT.get(given, given.replace("_", "-"))
            if GPUS_OF_AN_ENGINE.startswith(name) and name.startswith("--te"):
                name = GPUS_OF_AN_ENGINE
            yield name, value or (args[at + 1] if at + 1 < len(args) else "")
