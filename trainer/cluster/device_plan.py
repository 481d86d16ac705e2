"""Which GPU of this machine holds what: the ranks of the trainer, and the engines.

    enough GPUs      ranks 0 … K-1 on GPUs 0 … K-1, each engine on GPUs of its own after them
    fewer            mode `colocated`: engine i and rank i share GPUs, from GPU 0 on
    fewer still      refused, with the numbers

Invariant: a plan is refused before any process starts if the memory that it needs, by
`trainer.policy.memory`, is more than a GPU has.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainer.cluster.ranks import ranks_here
from trainer.engine import GPUS_OF_AN_ENGINE, HOST_TIER, EnginesConfig
from trainer.errors import ConfigError
from trainer.policy.memory import GIB, RankMemory, count_weights, rank_memory
from trainer.policy.model import ModelConfig, load_settings
from trainer.ranks_config import RanksConfig

C = TypeVar("C", bound=RanksConfig)
VISIBLE = "CUDA_VISIBLE_DEVICES"
ENGINE_SHARE = 0.92
"""vLLM's default share of a GPU's memory."""
ENGINE_EXTRA_BYTES = 2 * GIB
"""What an engine needs besides weights and cache: CUDA's context, its graphs, its activations."""
RANK_EXTRA_BYTES = GIB
"""What a rank needs besides its tensors: CUDA's context and fragmentation."""
ASLEEP_BYTES = 2 * GIB
"""What an engine keeps on a GPU while it sleeps."""


class RankTooLargeError(ConfigError):
    """A rank does not fit on its GPU, or leaves no room for the engine beside it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Example: Gpu("NVIDIA H100", 80 * 2**30)"""

    name: str
    memory: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine's memory on each of its GPUs, in bytes."""

    weights: int
    cache_per_token: int
    cache_per_sequence: int = 0
    """States of linear layers."""
    host_tier: int = 0
    """The machine's memory for what the cache has no room for, of all GPUs of the engine."""

    def least(self, tokens: int) -> int:
        """The least with which it can serve one sequence of this number of tokens."""
        cache = self.cache_per_token * tokens + self.cache_per_sequence
        return self.weights + ENGINE_EXTRA_BYTES + cache


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Example: DevicePlan(gpus, ranks=(0,), engines=((1,), (2,)), share=None, …).describe()"""

    gpus: tuple[Gpu, ...]
    ranks: tuple[int, ...]
    """The GPU of each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The GPUs of each engine."""
    share: float | None
    """The share of a GPU's memory for an engine that shares it with a rank."""
    rank: RankMemory
    engine: EngineMemory
    context_parallel: int = 1
    """Number of ranks that compute each micro-batch together."""
    shards: int = 0
    """Number of ranks over which each of several copies of the weights is sharded; 0: one copy."""
    checkpoints: bool = False
    """Whether `model.gradient_checkpointing` is on, by the configuration or because it must be."""

    def engine_config(self, engine: EnginesConfig, number: int, visible: str) -> EnginesConfig:
        """The settings of an engine with its GPUs. `visible`: this process's own
        CUDA_VISIBLE_DEVICES, whose entries the plan's numbers count."""
        names = [each.strip() for each in visible.split(",")] if visible else None
        own = [names[n] if names else str(n) for n in self.engines[number]]
        env = engine.env | {VISIBLE: ",".join(own)}
        share = engine.gpu_memory_share if self.share is None else self.share
        return engine.model_copy(update={"env": env, "gpu_memory_share": share})

    def describe(self) -> Iterator[str]:
        """A line for each GPU."""
        for number, gpu in enumerate(self.gpus):
            held = [self._rank(rank) for rank, on in enumerate(self.ranks) if on == number]
            held += [self._engine(n) for n, on in enumerate(self.engines) if number in on]
            what = " + ".join(held) or "unused"
            yield f"GPU {number} ({gpu.name}, {_gib(gpu.memory)}): {what}"

    def _rank(self, rank: int) -> str:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.rank.parts().items())
        unknown = "" if self.rank.passes is not None else ", activations unknown"
        group, number = divmod(rank, self.context_parallel)
        part = f" (part {number + 1}/{self.context_parallel} of group {group})"
        name = f"rank {rank}{part if self.context_parallel > 1 else ''}"
        name += f" (copy {rank // self.shards} of the weights)" if self.shards else ""
        return f"{name}, {_gib(self.rank.total)} ({parts}{unknown})"

    def _engine(self, number: int) -> str:
        share = self.share or ENGINE_SHARE
        smallest = min(self.gpus[n].memory for n in self.engines[number])
        room = int(smallest * share) - self.engine.weights - ENGINE_EXTRA_BYTES
        tokens = room // self.engine.cache_per_token
        size = len(self.engines[number])
        parallel = f" (1/{size})" if size > 1 else ""
        states = ""
        if self.engine.cache_per_sequence:
            place = self.engine.cache_per_sequence // self.engine.cache_per_token
            states = f"; the state of a sequence takes the place of {place:,}"
        host = ""
        if self.engine.host_tier:
            held = self.engine.host_tier // (size * self.engine.cache_per_token)
            host = f"; host tier of {_gib(self.engine.host_tier)}, about {held:,} tokens"
        return (
            f"engine {number}{parallel}, {share:.0%} of the memory (weights "
            f"{_gib(self.engine.weights)}, cache of about {tokens:,} tokens{states}{host})"
        )


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that PyTorch can use here."""
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    return tuple(Gpu(each.name, each.total_memory) for each in found)


def plan_devices(
    config: RanksConfig, gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ
) -> DevicePlan | None:
    """The plan for the engines and ranks on one machine, which are all, or as many ranks as
    torchrun's `environment` says; None if the run uses no GPU here, or if `engine.env` says which
    GPUs engines use.

    Raises:
        ConfigError: the processes do not fit on the GPUs, or need GPUs where there is none.
    """
    if not gpus or config.trainer.device == "cpu":
        _check_without_gpus(config)
        return None
    if VISIBLE in config.engine.env:
        return None
    sections = config.model_dump_json(include=set(RanksConfig.model_fields))
    return _planned(sections, tuple(gpus), ranks_here(config, environment))


def fitted(config: C, gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> C:
    """The configuration with what the plan decides: `model.gradient_checkpointing`, if it is None.
    Under torchrun on several machines it is on, because each makes a plan of its own, and all ranks
    must compute alike.

    Raises:
        ConfigError: as `plan_devices`.
    """
    plan = plan_devices(config, gpus, environment)
    if config.model.gradient_checkpointing is not None:
        return config
    on = plan is not None and (plan.checkpoints or _on_several_machines(environment))
    return config.model_copy(update={"model": _checkpointing(config, on)})


def _on_several_machines(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started ranks on other machines, too."""
    ranks = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", ranks) != ranks


def _checkpointing(config: RanksConfig, on: bool) -> ModelConfig:
    on = on or config.model.activation_offload
    return config.model.model_copy(update={"gradient_checkpointing": on})


@functools.lru_cache(maxsize=4)
def _planned(sections: str, gpus: tuple[Gpu, ...], local_ranks: int) -> DevicePlan:
    config = RanksConfig.model_validate_json(sections)
    if config.model.gradient_checkpointing is not None:
        return _fitting(config, gpus, local_ranks)
    try:
        without = config.model_copy(update={"model": _checkpointing(config, False)})
        return _fitting(without, gpus, local_ranks)
    except RankTooLargeError:
        on = config.model_copy(update={"model": _checkpointing(config, True)})
        return _fitting(on, gpus, local_ranks)


def _fitting(config: RanksConfig, gpus: tuple[Gpu, ...], local_ranks: int) -> DevicePlan:
    ranks = _gpus_of_ranks(config, gpus, local_ranks)
    size = config.engine.tensor_parallel
    replicas = 0 if config.engine.urls else config.engine.replicas
    rank, engine = _memory(config, size)
    free = [number for number in range(len(gpus)) if number not in ranks]
    wanted = replicas * size
    shared = config.engine.sleep or (
        wanted > len(free) and config.trainer.mode == "colocated" and wanted <= len(gpus)
    )
    if shared:
        free = list(range(len(gpus)))
    if wanted > len(free):
        can_share = config.trainer.mode == "separate" and wanted <= len(gpus)
        raise ConfigError(
            f"GPUs for engines: {wanted} (engine.replicas={replicas}, {size} each), and for ranks: "
            f"{len(ranks)} (trainer.ranks), but this machine has {len(gpus)}; lower them"
            f"{', or share GPUs: trainer.mode=colocated' if can_share else ''}"
        )
    engines = tuple(tuple(free[n * size : (n + 1) * size]) for n in range(replicas))
    shared = shared and bool({gpu for each in engines for gpu in each} & set(ranks))
    _check_host_tiers(replicas, engine.host_tier)
    share = _check(config, gpus, ranks, engines, rank, engine, shared=shared)
    trainer, copies = config.trainer, config.trainer.weight_copies
    shards = trainer.ranks // copies if copies > 1 else 0
    context = trainer.context_parallel
    checkpoints = bool(config.model.gradient_checkpointing)
    return DevicePlan(gpus, ranks, engines, share, rank, engine, context, shards, checkpoints)


def _check_without_gpus(config: RanksConfig) -> None:
    engine = config.engine
    served = engine.urls or engine.replicas
    if served and engine.weight_transfer in ("nccl", "ipc"):
        raise ConfigError(
            f"engine.weight_transfer={engine.weight_transfer}: the trainer uses no GPU here; use "
            "shm, or gloo to engines on other machines"
        )
    if engine.replicas and not engine.urls and engine.sleep:
        raise ConfigError("engine.sleep: the engines use no GPU here; set engine.sleep=false")
    if engine.replicas and not engine.urls and engine.host_tier_gib:
        raise ConfigError(
            f"engine.args: {HOST_TIER}: the engines use no GPU here, and vLLM has host tiers for "
            "GPUs only; leave it out"
        )


def _check_host_tiers(engines: int, tier_bytes: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if engines * tier_bytes > memory:
        raise ConfigError(
            f"engine.args: {HOST_TIER}: {engines} engines would use {_gib(engines * tier_bytes)} "
            f"of this machine's memory of {_gib(memory)}; lower it"
        )


def _gpus_of_ranks(config: RanksConfig, gpus: Sequence[Gpu], local_ranks: int) -> tuple[int, ...]:
    _, _, index = config.trainer.device.partition(":")
    ranks = (int(index),) if index else tuple(range(local_ranks))
    if max(ranks) >= len(gpus):
        raise ConfigError(
            f"trainer.ranks={config.trainer.ranks}, trainer.device={config.trainer.device}: "
            f"{len(ranks)} on this machine, which has {len(gpus)} GPUs, and each rank needs one; "
            "use at most that number"
        )
    return ranks


def _memory(config: RanksConfig, size: int) -> tuple[RankMemory, EngineMemory]:
    settings = load_settings(config.model.path)
    algorithm, lora = config.algorithm, config.model.lora
    refers = algorithm.kl is not None and (algorithm.kl.reference is not None or lora is None)
    # A sequence that is longer than a micro-batch has a pass of its own.
    longest = max(config.model.max_micro_batch_tokens, config.engine.max_context_tokens or 0)
    rank = rank_memory(
        settings,
        config.model.model_copy(update={"max_micro_batch_tokens": longest}),
        config.optimizer,
        ranks=config.trainer.ranks,
        context_parallel=config.trainer.context_parallel,
        weight_copies=config.trainer.weight_copies,
        trained_models=1 + (algorithm.critic is not None),
        frozen_models=refers + (algorithm.distillation is not None),
    )
    text = settings.get_text_config()
    count = count_weights(settings)
    width = 4 if config.engine.served_dtype(config.model) == "float32" else 2
    if text.num_attention_heads % size:
        raise ConfigError(
            f"engine.args: {GPUS_OF_AN_ENGINE} {size} does not divide the "
            f"{text.num_attention_heads} attention heads of {config.model.path}"
        )
    cache, states = _cache_bytes(text, width, size)
    tier = int(config.engine.host_tier_gib * GIB)
    return rank, EngineMemory(count * width // size, cache, states, tier)


def _cache_bytes(text: Any, width: int, size: int) -> tuple[int, int]:
    """Bytes of an engine's cache on one of its `size` GPUs: per token, keys and values of `width`
    bytes in the layers of attention; per sequence, the states of linear layers, which engines keep
    in float32, with the last inputs of their convolutions."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    linear = kinds.count("linear_attention")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 2 * (len(kinds) - linear) * max(1, heads // size) * head * width
    if not linear:
        return cache, 0
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    window = (2 * keys + values) * (text.linear_conv_kernel_dim - 1) * width
    return cache, linear * (4 * values * text.linear_key_head_dim + window) // size


def _check(
    config: RanksConfig,
    gpus: Sequence[Gpu],
    ranks: Sequence[int],
    engines: Sequence[Sequence[int]],
    rank: RankMemory,
    engine: EngineMemory,
    *,
    shared: bool,
) -> float | None:
    """Checks that everything fits. Returns an engine's share of a GPU that it shares."""
    sleep, share = config.engine.sleep, config.engine.gpu_memory_share
    smallest = min(gpus[n].memory for n in ranks)
    needed = rank.total + RANK_EXTRA_BYTES + (ASLEEP_BYTES if shared and sleep else 0)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in rank.parts().items())
    if needed > smallest:
        raise RankTooLargeError(
            f"a rank needs {_gib(needed)} of a GPU's {_gib(smallest)} ({parts})"
            f"{_advice(config, rank)}"
        )
    if shared:
        beside = (rank.resident if sleep else rank.total) + RANK_EXTRA_BYTES
        at_most = math.floor(100 * (1 - beside / smallest)) / 100
        if share is not None and share > at_most:
            raise RankTooLargeError(
                f"engine.gpu_memory_share={share:g}: a rank on the same GPU of {_gib(smallest)} "
                f"needs {_gib(beside)} meanwhile ({parts}); use at most {at_most:g}"
                f"{'' if sleep else ', or engine.sleep=true'}"
            )
        share = at_most if share is None else share
    least = engine.least(config.engine.max_context_tokens or 1)
    for each in engines:
        room = int((share or ENGINE_SHARE) * min(gpus[n].memory for n in each))
        if least > room:
            kind = RankTooLargeError if shared else ConfigError
            raise kind(
                f"an engine needs {_gib(least)} on each of its GPUs (weights "
                f"{_gib(engine.weights)}), and gets {_gib(room)}; use --tensor-parallel-size in "
                f"engine.args, or a larger engine.gpu_memory_share"
                f"{', or more GPUs, so that ranks and engines share none' if shared else ''}"
            )
    return share if shared else None


def _advice(config: RanksConfig, rank: RankMemory) -> str:
    ways = []
    if rank.lacks_fla:
        ways.append("fla's kernels (pip install flash-linear-attention)")
    if not config.model.gradient_checkpointing:
        ways.append("model.gradient_checkpointing=true")
    if (rank.passes or 0) > rank.total // 2:
        ways.append("a smaller model.max_micro_batch_tokens or engine.max_context_tokens")
        ways.append("a larger trainer.context_parallel")
    if (rank.passes or 0) > rank.total // 4 and not config.model.activation_offload:
        ways.append("model.activation_offload=true")
    if config.optimizer.name == "adamw" and rank.moments > rank.total // 10:
        ways += ["optimizer.offload=true", "optimizer.name=adamw_8bit"]
    if config.model.weights_dtype == "float32" and config.model.compute_dtype == "bfloat16":
        ways.append("model.weights_dtype=bfloat16")
    if config.model.lora is None:
        ways.append("model.lora")
    return "; use " + ", ".join([*ways, "more trainer.ranks, each with a GPU"])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
