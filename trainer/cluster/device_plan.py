"""Which GPU of this machine holds what: the ranks of the trainer, and the engines.

    enough GPUs      ranks 0 … K-1 on GPUs 0 … K-1, each engine on GPUs of its own after them
    fewer            mode `colocated`: engine i and rank i share GPUs, from GPU 0 on
    fewer still      refused, with the numbers

On each GPU it counts what really lies there: the ranks' tensors, and what their allocator keeps
reserved besides; an engine's weights, adapters, activations and cache; judges; a CUDA context for
each process; what other programs use; and a margin.

Invariant: a plan is refused before any process starts if the memory that it needs, by
`trainer.policy.memory`, is more than a GPU has.
"""

from __future__ import annotations

import functools
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from proxy.engines.vllm_server import VllmConfig
from trainer.cluster.ranks import ranks_here
from trainer.engine import GPUS_OF_AN_ENGINE, HOST_TIER, EnginesConfig
from trainer.errors import ConfigError
from trainer.policy.model_config import MICRO_BATCH_TOKENS, context_limit, load_settings
from trainer.policy.rank_memory import GIB, RankMemory
from trainer.ranks_config import RanksConfig

C = TypeVar("C", bound=RanksConfig)
VISIBLE = "CUDA_VISIBLE_DEVICES"
ENGINE_SHARE = 0.92
"""vLLM's default share of a GPU's memory."""
CONTEXT_BYTES = GIB * 3 // 4
"""CUDA's context of a process on a GPU, with the kernels that it has loaded: each rank has one, and
each worker of an engine. The process of vLLM's API server has none. vLLM measures its memory from
after its context exists, so that it comes on top of its share."""
MARGIN_BYTES = GIB
"""Memory of a GPU that the plan gives to nobody: what else allocates there, and what this plan does
not know."""
ENGINE_EXTRA_BYTES = 2 * GIB
"""What an engine needs besides weights and cache: its CUDA graphs and activations."""
RESERVED_SHARE = 1 / 16
"""Share of a rank's tensors that its allocator keeps reserved besides them when it has emptied its
cache: segments that are still used in part."""
ASLEEP_BYTES = 2 * GIB
"""What an engine keeps on a GPU while it sleeps: its context, CUDA graphs and buffers."""
CONTEXTS_PER_TRIAL = 2
"""Conversations of the greatest length that a running trial has in the cache: its agent's own, and
that of a sub-agent or a judge. A larger cache is not used, and each block of it costs time: a model
of 0.7 M weights on an H200 would have 5.9 M blocks, which take 7.6 s to make, and 0.2 s of the
pause of each update."""


PLANNED = ("gradient_checkpointing", "max_micro_batch_tokens", "prefix_gib")
"""The keys of `model` whose value `fitted` decides if it is None."""
MOST_TOKENS, STEP_TOKENS = 65536, 1024
"""The most tokens of a micro-batch that the plan chooses, whose products fill any GPU, and of which
it chooses a multiple."""


class RankTooLargeError(ConfigError):
    """A rank does not fit on its GPU, or leaves no room for the engine beside it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Example: Gpu("NVIDIA H100", 80 * 2**30)"""

    name: str
    memory: int
    """In bytes."""
    free: int | None = None
    """Bytes that nothing used before the run; None: all."""

    @property
    def usable(self) -> int:
        """Bytes that the plan divides."""
        return (self.memory if self.free is None else self.free) - MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """An engine's memory on each of its GPUs, in bytes."""

    weights: int
    cache_per_token: int
    cache_per_sequence: int = 0
    """States of linear layers."""
    host_tier: int = 0
    """The machine's memory for what the cache has no room for, of all GPUs of the engine."""
    adapters: int = 0
    """Places for LoRA adapters."""

    @property
    def fixed(self) -> int:
        """Everything but the cache."""
        return self.weights + self.adapters + ENGINE_EXTRA_BYTES

    def cache(self, sequences: int, tokens: int) -> int:
        """The cache of sequences of this number of tokens each."""
        return sequences * (self.cache_per_token * tokens + self.cache_per_sequence)

    def least(self, tokens: int) -> int:
        """The least with which it can serve one sequence of this number of tokens."""
        return self.fixed + self.cache(1, tokens)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Example: DevicePlan(gpus, ranks=(0,), engines=((1,), (2,)), share=None, …).describe()"""

    gpus: tuple[Gpu, ...]
    ranks: tuple[int, ...]
    """The GPU of each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The GPUs of each engine."""
    share: float | None
    """The share of a GPU's memory for an engine; None: there is no engine."""
    rank: RankMemory | None
    """None: nothing is trained."""
    engine: EngineMemory
    kv_cache_gib: int | None = None
    """The cache that an engine makes; None: what the share leaves."""
    judges: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Judges that are served on a GPU, by its number: a description of each."""
    context_parallel: int = 1
    """Number of ranks that compute each micro-batch together."""
    shards: int = 0
    """Number of ranks over which each of several copies of the weights is sharded; 0: one copy."""
    checkpointing: bool | int = False
    """`model.gradient_checkpointing`, of the configuration or as it must be."""
    prefix_gib: float | None = None
    """`model.prefix_gib`, likewise."""
    micro_batch_tokens: int | None = None
    """`model.max_micro_batch_tokens`, if the plan decides it."""

    @property
    def left(self) -> int:
        """Bytes that a rank leaves on the smallest of the ranks' GPUs."""
        assert self.rank is not None
        usable = min(self.gpus[number].usable for number in self.ranks)
        return usable - CONTEXT_BYTES - self.rank.total

    @property
    def shared(self) -> bool:
        """Whether an engine and a rank are on one GPU."""
        return not {gpu for each in self.engines for gpu in each}.isdisjoint(self.ranks)

    def engine_config(self, engine: EnginesConfig, number: int, visible: str) -> EnginesConfig:
        """The settings of an engine with its GPUs. `visible`: this process's own
        CUDA_VISIBLE_DEVICES, whose entries the plan's numbers count."""
        names = [each.strip() for each in visible.split(",")] if visible else None
        own = [names[n] if names else str(n) for n in self.engines[number]]
        env = engine.env | {VISIBLE: ",".join(own)}
        given = {"gpu_memory_share": self.share, "kv_cache_gib": self.kv_cache_gib}
        return engine.model_copy(update={"env": env, **given})

    def describe(self) -> Iterator[str]:
        """A line for each GPU."""
        for number, gpu in enumerate(self.gpus):
            held = [self._rank(rank) for rank, on in enumerate(self.ranks) if on == number]
            held += [self._engine(n) for n, on in enumerate(self.engines) if number in on]
            held += self.judges.get(number, ())
            contexts = f"; {_gib(CONTEXT_BYTES)} of CUDA for each, {_gib(MARGIN_BYTES)} for nobody"
            contexts = contexts if held else ""
            free = "" if gpu.free is None else f", {_gib(gpu.free)} free"
            what = " + ".join(held) or "unused"
            yield f"GPU {number} ({gpu.name}, {_gib(gpu.memory)}{free}): {what}{contexts}"

    def _rank(self, rank: int) -> str:
        assert self.rank is not None
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.rank.parts().items())
        unknown = "" if self.rank.passes is not None else ", activations unknown"
        group, number = divmod(rank, self.context_parallel)
        part = f" (part {number + 1}/{self.context_parallel} of group {group})"
        name = f"rank {rank}{part if self.context_parallel > 1 else ''}"
        name += f" (copy {rank // self.shards} of the weights)" if self.shards else ""
        longest, here = self.rank.longest_prefix, self.rank.kept_prefix
        if longest > here:
            unknown += (
                f"; the longest prefix keeps {_gib(longest)}, {_gib(longest - here)} of it in the "
                "machine's memory"
            )
        if self.micro_batch_tokens is not None:
            unknown += f"; micro-batches of {self.micro_batch_tokens:,} tokens"
        return f"{name}, {_gib(self.rank.total)} ({parts}{unknown})"

    def _engine(self, number: int) -> str:
        share, engine = self.share or ENGINE_SHARE, self.engine
        cache = _cache_room(self.gpus, self.engines[number], share, engine)
        if self.kv_cache_gib is not None:
            cache = self.kv_cache_gib * GIB
        size = len(self.engines[number])
        parallel = f" (1/{size})" if size > 1 else ""
        states = ""
        if engine.cache_per_sequence:
            place = engine.cache_per_sequence // engine.cache_per_token
            states = f"; the state of a sequence takes the place of {place:,}"
        host = ""
        if engine.host_tier:
            held = engine.host_tier // (size * engine.cache_per_token)
            host = f"; host tier of {_gib(engine.host_tier)}, about {held:,} tokens"
        adapters = f"adapters {_gib(engine.adapters)}, " if engine.adapters else ""
        return (
            f"engine {number}{parallel}, {share:.0%} of the memory (weights "
            f"{_gib(engine.weights)}, {adapters}cache of {_gib(cache)}, about "
            f"{cache // engine.cache_per_token:,} tokens{states}{host})"
        )


@functools.cache  # once, before the run itself has allocated anything
def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that PyTorch can use here."""
    count = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    return tuple(Gpu(each.name, each.total_memory, _free(each)) for each in found)


def _free(properties: Any) -> int | None:
    """The free memory of a GPU, by the driver's library: CUDA would have to create a context on the
    GPU to say so. None: it cannot be asked."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        return None
    except pynvml.NVMLError:  # a part of a GPU (MIG), or a driver without it
        return None


def plan_devices(
    config: RanksConfig,
    gpus: Sequence[Gpu],
    environment: Mapping[str, str] = os.environ,
    *,
    trains: bool = True,
) -> DevicePlan | None:
    """The plan for the engines, judges and ranks on one machine, which are all, or as many ranks as
    torchrun's `environment` says; None if the run uses no GPU here, or if `engine.env` says which
    GPUs engines use. `trains`: whether there are ranks at all.

    Raises:
        ConfigError: the processes do not fit on the GPUs, or need GPUs where there is none.
    """
    if not gpus or (trains and config.trainer.device == "cpu"):
        _check_without_gpus(config)
        return None
    if VISIBLE in config.engine.env:
        return None
    sections = config.model_dump_json(include=set(RanksConfig.model_fields))
    judges = tuple((key, judge.model_dump_json()) for key, judge in config.served_judges.items())
    visible = environment.get(VISIBLE, "")
    ranks = ranks_here(config, environment) if trains else 0
    return _planned(sections, judges, tuple(gpus), visible, ranks)


def fitted(config: C, gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> C:
    """The configuration with what the plan decides where a key is None: in how many layers
    `model.gradient_checkpointing` is on, the fewest with which everything fits, how much of the
    prefixes is on the GPU, `model.prefix_gib`, and how many tokens a micro-batch has,
    `model.max_micro_batch_tokens`, the most with which no layer more is recomputed (not with
    `trainer.deterministic`). Under torchrun on several machines all layers are recomputed, and
    micro-batches have their default, because each machine makes a plan of its own, and all ranks
    must compute alike.

    Raises:
        ConfigError: as `plan_devices`.
    """
    if _on_several_machines(environment):
        config = _with(config, max_micro_batch_tokens=config.model.micro_batch_tokens)
        if config.model.gradient_checkpointing is None:
            config = _with(config, gradient_checkpointing=bool(gpus))
    plan = plan_devices(config, gpus, environment)
    if plan is None:
        model = config.model
        on = model.gradient_checkpointing or model.activation_offload
        return _with(
            config, gradient_checkpointing=on, max_micro_batch_tokens=model.micro_batch_tokens
        )
    return _with(
        config,
        gradient_checkpointing=plan.checkpointing,
        prefix_gib=plan.prefix_gib,
        max_micro_batch_tokens=plan.micro_batch_tokens or config.model.micro_batch_tokens,
    )


def _on_several_machines(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started ranks on other machines, too."""
    ranks = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", ranks) != ranks


def _with(config: C, **model: Any) -> C:
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


@functools.lru_cache(maxsize=4)
def _planned(
    sections: str,
    judges: tuple[tuple[str, str], ...],
    gpus: tuple[Gpu, ...],
    visible: str,
    local_ranks: int,
) -> DevicePlan:
    config = RanksConfig.model_validate_json(sections)
    servers = {key: VllmConfig.model_validate_json(each) for key, each in judges}

    def fitting(chosen: RanksConfig) -> DevicePlan:
        return _fitting(chosen, servers, gpus, visible, local_ranks)

    least = _recomputing(config, fitting, local_ranks)
    given = config.model.max_micro_batch_tokens
    beside = least.shared and not config.engine.sleep  # what a rank leaves is for that engine
    unknown = least.rank is None or least.rank.passes is None
    # Sums depend on it, and free memory is another one in a run that is repeated.
    if given is not None or beside or unknown or config.trainer.deterministic:
        return least

    def wider(tokens: int) -> DevicePlan | None:
        chosen = _with(
            config,
            gradient_checkpointing=least.checkpointing,
            prefix_gib=least.prefix_gib,
            max_micro_batch_tokens=tokens,
        )
        try:
            return replace(fitting(chosen), micro_batch_tokens=tokens)
        except RankTooLargeError:
            return None

    sizes = range(MICRO_BATCH_TOKENS, MOST_TOKENS + 1, STEP_TOKENS)
    most = bisect_left(sizes, True, lo=1, key=lambda size: wider(size) is None)
    return wider(sizes[most - 1]) or least


def _recomputing(
    config: RanksConfig, fitting: Callable[[RanksConfig], DevicePlan], local_ranks: int
) -> DevicePlan:
    """The plan in which the fewest layers are recomputed. `fitting`: the plan of a configuration
    whose keys of `PLANNED` are decided."""

    def plan(on: bool | int | None, prefix_gib: float | None) -> DevicePlan:
        return fitting(_with(config, gradient_checkpointing=on, prefix_gib=prefix_gib))

    def placing(on: bool | int | None) -> DevicePlan:
        """The plan with as much of the prefixes on the GPU as it has room for."""
        given = config.model.prefix_gib
        try:
            return plan(on, given)
        except RankTooLargeError:
            if given is not None or config.model.activation_offload:
                raise
        least = plan(on, 0)
        if least.shared and not config.engine.sleep:
            return least  # what a rank leaves is for the engine beside it
        left = least.left - (ASLEEP_BYTES if least.shared else 0)
        room = math.floor(10 * left / GIB) / 10
        return plan(on, room) if room > 0 else least

    def fits(layers: int) -> bool:
        try:
            return bool(placing(layers))
        except RankTooLargeError:
            return False

    given = config.model.gradient_checkpointing
    if given is not None or not local_ranks:
        return placing(given)
    if config.model.activation_offload:
        return placing(True)
    try:
        return placing(False)
    except RankTooLargeError:
        whole = placing(True)
    if whole.shared and not config.engine.sleep:
        return whole  # what a rank leaves is for the engine beside it
    from trainer.policy.memory import recomputable

    counts = recomputable(load_settings(config.model.path))
    fewest = bisect_left(counts, True, key=fits)
    return placing(counts[fewest]) if fewest < len(counts) - 1 else whole


def _fitting(
    config: RanksConfig,
    judges: Mapping[str, VllmConfig],
    gpus: tuple[Gpu, ...],
    visible: str,
    local_ranks: int,
) -> DevicePlan:
    ranks = _gpus_of_ranks(config, gpus, local_ranks)
    size = config.engine.tensor_parallel
    replicas = 0 if config.engine.urls else config.engine.replicas
    settings = load_settings(config.model.path)
    rank = None
    if ranks:
        rank = _rank_memory(config, settings, max(gpus[number].memory for number in ranks))
    engine = _engine_memory(config, settings)
    free = [number for number in range(len(gpus)) if number not in ranks]
    wanted = replicas * size
    shared = bool(ranks) and (
        config.engine.sleep
        or (wanted > len(free) and config.trainer.mode == "colocated" and wanted <= len(gpus))
    )
    if shared:
        free = list(range(len(gpus)))
    if wanted > len(free):
        can_share = bool(ranks) and config.trainer.mode == "separate" and wanted <= len(gpus)
        raise ConfigError(
            f"GPUs for engines: {wanted} (engine.replicas={replicas}, {size} each), and for ranks: "
            f"{len(ranks)} (trainer.ranks), but this machine has {len(gpus)}; lower them"
            f"{', or share GPUs: trainer.mode=colocated' if can_share else ''}"
        )
    engines = tuple(tuple(free[n * size : (n + 1) * size]) for n in range(replicas))
    shared = shared and bool({gpu for each in engines for gpu in each} & set(ranks))
    _check_host_tiers(replicas, engine.host_tier)
    if shared and config.engine.weight_transfer == "nccl":
        raise ConfigError(
            "engine.weight_transfer=nccl: NCCL connects different GPUs, and an engine is on that "
            "of a rank; use shm"
        )
    used = {*ranks, *(gpu for each in engines for gpu in each)}
    served, left = _with_judges(judges, gpus, visible, used)
    context = config.engine.max_context_tokens or context_limit(settings)
    share, kv_cache_gib = _check(config, left, ranks, engines, rank, engine, context, shared=shared)
    trainer, copies = config.trainer, config.trainer.weight_copies
    shards = trainer.ranks // copies if copies > 1 else 0
    return DevicePlan(
        gpus,
        ranks,
        engines,
        share,
        rank,
        engine,
        kv_cache_gib,
        served,
        trainer.context_parallel,
        shards,
        config.model.gradient_checkpointing or False,
        config.model.prefix_gib,
    )


def _check_without_gpus(config: RanksConfig) -> None:
    engine = config.engine
    served = engine.urls or engine.replicas
    if served and engine.weight_transfer == "nccl":
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


def _with_judges(
    judges: Mapping[str, VllmConfig], gpus: tuple[Gpu, ...], visible: str, used: set[int]
) -> tuple[dict[int, tuple[str, ...]], tuple[Gpu, ...]]:
    """The judges that are served on each GPU, and the GPUs with what these leave. `used`: by ranks
    and engines."""
    names = (
        [each.strip() for each in visible.split(",")]
        if visible
        else list(map(str, range(len(gpus))))
    )
    served: dict[int, tuple[str, ...]] = {}
    left = list(gpus)
    for key, judge in judges.items():
        own = judge.env.get(VISIBLE, names[0]).split(",")
        for number in (names.index(each.strip()) for each in own if each.strip() in names):
            if judge.gpu_memory_share is None and number in used:
                raise ConfigError(
                    f"{key}.model: its server would take {ENGINE_SHARE:.0%} of GPU {number}, "
                    f"which this run uses; give it another GPU by {key}.engine.env={{{VISIBLE}: "
                    f"…}}, or a part of this one by {key}.engine.gpu_memory_share"
                )
            share, gpu = judge.gpu_memory_share or ENGINE_SHARE, left[number]
            free = gpu.memory if gpu.free is None else gpu.free
            rest = free - int(share * gpu.memory) - CONTEXT_BYTES
            left[number] = replace(gpu, free=rest)
            if rest < 0:
                raise ConfigError(
                    f"{key}.engine.gpu_memory_share={share:g}: GPU {number} has {_gib(free)} for "
                    "it; lower it, or use another GPU"
                )
            served[number] = (*served.get(number, ()), f"{key}, {share:.0%} of the memory")
    return served, tuple(left)


def _gpus_of_ranks(config: RanksConfig, gpus: Sequence[Gpu], local_ranks: int) -> tuple[int, ...]:
    if not local_ranks:
        return ()
    _, _, index = config.trainer.device.partition(":")
    ranks = (int(index),) if index else tuple(range(local_ranks))
    if max(ranks) >= len(gpus):
        raise ConfigError(
            f"trainer.ranks={config.trainer.ranks}, trainer.device={config.trainer.device}: "
            f"{len(ranks)} on this machine, which has {len(gpus)} GPUs, and each rank needs one; "
            "use at most that number"
        )
    return ranks


def _rank_memory(config: RanksConfig, settings: Any, gpu_bytes: int) -> RankMemory:
    from trainer.policy.memory import rank_memory  # its passes load what computes layers

    algorithm, lora = config.algorithm, config.model.lora
    refers = algorithm.kl is not None and (algorithm.kl.reference is not None or lora is None)
    return rank_memory(
        settings,
        config.model,
        config.optimizer,
        ranks=config.trainer.ranks,
        context_parallel=config.trainer.context_parallel,
        weight_copies=config.trainer.weight_copies,
        longest=config.engine.max_context_tokens or context_limit(settings),
        trained_models=1 + (algorithm.critic is not None),
        frozen_models=refers + (algorithm.distillation is not None),
        gpu_bytes=gpu_bytes,
    )


def _engine_memory(config: RanksConfig, settings: Any) -> EngineMemory:
    """Of an engine as `config.engine` describes it, with the adapters that it samples with."""
    from trainer.policy.memory import adapter_weights, count_weights

    text, size = settings.get_text_config(), config.engine.tensor_parallel
    width = 4 if config.engine.served_dtype(config.model) == "float32" else 2
    if text.num_attention_heads % size:
        raise ConfigError(
            f"engine.args: {GPUS_OF_AN_ENGINE} {size} does not divide the "
            f"{text.num_attention_heads} attention heads of {config.model.path}"
        )
    cache, states = _cache_bytes(text, width, size)
    tier = int(config.engine.host_tier_gib * GIB)
    rank, slots = config.engine_adapters
    # vLLM divides one of an adapter's two matrices among the GPUs.
    adapters = slots * adapter_weights(settings, rank) * width if slots else 0
    return EngineMemory(count_weights(settings) * width // size, cache, states, tier, adapters)


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
    rank: RankMemory | None,
    engine: EngineMemory,
    context: int,
    *,
    shared: bool,
) -> tuple[float | None, int | None]:
    """Checks that everything fits. Returns an engine's share of each of its GPUs, and the GiB of
    its cache, None: what the share leaves. `context`: tokens of the longest sequence."""
    sleep, share = config.engine.sleep, config.engine.gpu_memory_share
    beside, parts = 0, ""
    if rank is not None:
        smallest = min(gpus[n].usable for n in ranks)
        needed = rank.total + CONTEXT_BYTES + (ASLEEP_BYTES if shared and sleep else 0)
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in rank.parts().items())
        if needed > smallest:
            raise RankTooLargeError(
                f"a rank needs {_gib(needed)} of the {_gib(smallest)} that a GPU has for it "
                f"({parts})"
                f"{_advice(config, rank)}"
            )
        if shared:
            kept = int(rank.resident * (1 + RESERVED_SHARE)) if sleep else rank.total
            beside = kept + CONTEXT_BYTES
    if not engines:
        return share, None
    own = [gpus[n] for each in engines for n in each]
    at_most = min(
        (gpus[n].usable - CONTEXT_BYTES - (beside if n in ranks else 0)) / gpus[n].memory
        for each in engines
        for n in each
    )
    at_most = math.floor(100 * at_most) / 100
    if share is not None and share > at_most:
        kind, why = ConfigError, f"a GPU has {_gib(min(gpu.usable for gpu in own))} for it"
        if shared:
            kind = RankTooLargeError
            why = f"a rank on the same GPU needs {_gib(beside)} meanwhile ({parts})"
        raise kind(
            f"engine.gpu_memory_share={share:g}: {why}; use at most {at_most:g}"
            f"{', or engine.sleep=true' if shared and not sleep else ''}"
        )
    memory = min(gpu.memory for gpu in own)
    room = int((share or min(ENGINE_SHARE, at_most)) * memory)
    given = config.engine.kv_cache_gib
    least = engine.least(context) if given is None else engine.fixed + given * GIB
    if least > room or (given is not None and engine.cache(1, context) > given * GIB):
        raise (RankTooLargeError if shared else ConfigError)(
            f"an engine needs {_gib(max(least, engine.least(context)))} on each of its GPUs "
            f"(weights {_gib(engine.weights)}, one sequence of {context:,} tokens "
            f"{_gib(engine.cache(1, context))}), and gets {_gib(max(room, 0))}"
            f"{'' if given is None else f' (engine.kv_cache_gib={given})'}; use "
            f"a smaller engine.max_context_tokens, {GPUS_OF_AN_ENGINE} in engine.args, or a larger "
            f"engine.gpu_memory_share"
            f"{', or more GPUs, so that ranks and engines share none' if shared else ''}"
        )
    if given is None and share is None and not engine.cache_per_sequence:
        sequences = CONTEXTS_PER_TRIAL * config.rollout.concurrency
        wanted = math.ceil(engine.cache(sequences, context) / GIB)
        if engine.fixed + wanted * GIB < room:
            given = wanted
    if share is None and given is not None:
        room = engine.fixed + given * GIB
    return share or math.ceil(100 * room / memory) / 100, given


def _cache_room(gpus: Sequence[Gpu], own: Sequence[int], share: float, engine: EngineMemory) -> int:
    """The bytes that vLLM's share leaves for its cache."""
    return int(min(gpus[n].memory for n in own) * share) - engine.fixed


def _advice(config: RanksConfig, rank: RankMemory) -> str:
    ways = []
    if rank.lacks_fla:
        ways.append("fla's kernels (pip install flash-linear-attention)")
    if not config.model.gradient_checkpointing:
        ways.append("model.gradient_checkpointing=true")
    if rank.parts().get("prefixes", 0) > rank.total // 20 and config.model.prefix_bytes != 0:
        ways.append("model.prefix_gib=0")
    if (rank.passes or 0) > rank.total // 2:
        ways.append("a smaller model.max_micro_batch_tokens or engine.max_context_tokens")
        ways.append("a larger trainer.context_parallel")
    if (rank.passes or 0) > rank.total // 4 and not config.model.activation_offload:
        ways.append("model.activation_offload=true")
    if config.optimizer.name == "adamw" and rank.moments > rank.total // 10:
        ways.append("optimizer.offload=true")
        if config.trainer.ranks == 1 and config.model.weights_dtype == "float32":
            ways.append("optimizer.name=adamw_8bit")
    if config.model.weights_dtype == "float32" and config.model.compute_dtype == "bfloat16":
        ways.append("model.weights_dtype=bfloat16")
    if config.model.lora is None:
        ways.append("model.lora")
    return "; use " + ", ".join([*ways, "more trainer.ranks, each with a GPU"])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
