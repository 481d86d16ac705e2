"""Which GPU holds what, for lists of GPUs that this machine does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import Qwen3Config

from proxy.engines.vllm_server import VllmConfig
from trainer import start
from trainer.cluster import device_plan, local
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.device_plan import DevicePlan, Gpu, fitted, plan_devices
from trainer.cluster.local import LocalCluster
from trainer.cluster.replica_server import replica_server
from trainer.engine import EnginesConfig
from trainer.errors import ConfigError
from trainer.policy.model_config import ModelConfig, load_settings
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig
from trainer.run.folder import RunFolder

GIB = 2**30
LARGE = Gpu("made-up 16", 16 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model of 91 million weights."""
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=64000,
        max_position_embeddings=2048,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def config(model: Path, /, **sections: dict[str, Any]) -> RanksConfig:
    sections = {"model": {}, **sections}
    sections["model"] = {"path": model, "max_micro_batch_tokens": 2048, **sections["model"]}
    return RanksConfig.model_validate(sections)


def planned(model: Path, gpus: Sequence[Gpu], /, **sections: dict[str, Any]) -> DevicePlan:
    plan = plan_devices(config(model, **sections), gpus)
    assert plan is not None
    return plan


def test_ranks_and_engines_have_gpus_of_their_own_if_there_are_enough(model: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "trainer": {"ranks": 2, "mode": "separate"},
        "engine": {"replicas": 3, "args": ("--tensor-parallel-size", "2")},
        "rollout": {"concurrency": 1000},
    }
    plan = planned(model, [LARGE] * 8, **sections)
    assert (plan.ranks, plan.engines) == ((0, 1), ((2, 3), (4, 5), (6, 7)))
    assert plan.share == 0.89  # vLLM's 0.92 would leave less than the margin
    lines = list(plan.describe())
    assert len(lines) == 8
    assert lines[0].startswith("GPU 0 (made-up 16, 16.0 GiB): rank 0, ")
    assert "engine 2 (1/2)" in lines[7]


def test_ranks_that_share_micro_batches_are_named_and_need_less(model: Path) -> None:
    engine = {"urls": ("http://127.0.0.1:1",)}
    alone = planned(model, [LARGE] * 4, engine=engine, trainer={"ranks": 4})
    trainer = {"ranks": 4, "context_parallel": 2}
    plan = planned(model, [LARGE] * 4, engine=engine, trainer=trainer)
    assert plan.rank.passes is not None
    assert alone.rank.passes is not None
    assert plan.rank.passes < 0.8 * alone.rank.passes
    lines = list(plan.describe())
    assert "rank 0, " in next(alone.describe())
    assert "rank 1 (part 2/2 of group 0), " in lines[1]
    assert "rank 2 (part 1/2 of group 1), " in lines[2]


def test_copies_of_the_weights_are_named_and_each_has_fewer_shards(model: Path) -> None:
    engine = {"urls": ("http://127.0.0.1:1",)}
    alone = planned(model, [LARGE] * 4, engine=engine, trainer={"ranks": 4})
    trainer = {"ranks": 4, "weight_copies": 2}
    plan = planned(model, [LARGE] * 4, engine=engine, trainer=trainer)
    assert plan.rank.resident == pytest.approx(2 * alone.rank.resident, rel=1e-6)
    assert plan.rank.passes == alone.rank.passes
    assert "rank 2 (copy 1 of the weights), " in list(plan.describe())[2]


def test_a_single_gpu_is_shared_by_what_each_needs(model: Path) -> None:
    many = {"rollout": {"concurrency": 1000}}  # whose contexts have no room
    plan = planned(model, [LARGE], **many)
    assert (plan.ranks, plan.engines) == ((0,), ((0,),))
    assert plan.share is not None
    assert plan.share * LARGE.memory + plan.rank.total < LARGE.memory
    asleep = planned(model, [LARGE], engine={"sleep": True}, **many)
    assert asleep.share is not None
    assert asleep.share > plan.share


def test_gradient_checkpointing_is_on_where_a_rank_does_not_fit_without_it(model: Path) -> None:
    def decided(gib: float, **own: bool) -> bool | int | None:
        gpus = [Gpu("made-up", int(gib * GIB))] * 2
        given = config(model, model=own, engine={"urls": ("http://127.0.0.1:1",)})
        return fitted(given, gpus).model.gradient_checkpointing

    off = planned(model, [LARGE] * 2, model={"gradient_checkpointing": False}).rank.total
    on = planned(model, [LARGE] * 2, model={"gradient_checkpointing": True}).rank.total
    assert on < off - GIB / 2
    beside = (device_plan.CONTEXT_BYTES + device_plan.MARGIN_BYTES) / GIB
    between = beside + (on + off) / 2 / GIB
    assert (decided(16), decided(between)) == (False, 2)
    assert decided(16, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match=r"a rank needs .*model\.gradient_checkpointing=true"):
        decided(between, gradient_checkpointing=False)
    assert fitted(config(model), []).model.gradient_checkpointing is False


def save_qwen3_1_7b(folder: Path, context_tokens: int) -> None:
    Qwen3Config(
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151936,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)


LONG = pytest.mark.long
WHOLE = {"compute_dtype": "bfloat16", "compile_layers": True}
ADAPTER = {"weights_dtype": "bfloat16", "compile_layers": True, "lora": {"rank": 16}}


@pytest.mark.parametrize(
    ("gigabytes", "own", "recomputes"),
    [(24, ADAPTER, True), pytest.param(80, WHOLE, True, marks=LONG), (141, WHOLE, False)],
)
def test_memory_is_used_and_the_fewest_layers_are_recomputed(
    tmp_path: Path, gigabytes: int, own: dict[str, Any], recomputes: bool
) -> None:
    """Micro-batches of 32,768 tokens of Qwen3-1.7B."""
    save_qwen3_1_7b(tmp_path, 32768)
    own = {"max_micro_batch_tokens": 32768, **own}
    given = config(tmp_path, model=own, engine={"urls": ("http://127.0.0.1:1",)})
    gpu = Gpu("made-up", gigabytes * 10**9)

    def needed(layers: int) -> int:
        more = {"gradient_checkpointing": layers or False, "prefix_gib": 0}
        chosen = given.model_copy(update={"model": given.model.model_copy(update=more)})
        rank = device_plan._rank_memory(chosen, load_settings(tmp_path), gpu.memory)
        return rank.total + device_plan.CONTEXT_BYTES

    model = fitted(given, [gpu]).model
    count = int(model.gradient_checkpointing or 0)
    assert (count > 0) is recomputes
    assert needed(count) <= gpu.usable
    if recomputes:
        assert needed(count - 1) > gpu.usable
        assert needed(count) > 0.9 * gpu.usable


@pytest.mark.parametrize(
    ("gigabytes", "own", "filled"),
    [
        (24, ADAPTER, True),
        (40, WHOLE, False),
        pytest.param(80, WHOLE, True, marks=LONG),
        pytest.param(141, WHOLE, True, marks=LONG),
    ],
)
def test_micro_batches_are_as_large_as_what_is_kept_has_room_for(
    tmp_path: Path, gigabytes: int, own: dict[str, Any], filled: bool
) -> None:
    """Of Qwen3-1.7B, whose longest sequence has 4,096 tokens."""
    save_qwen3_1_7b(tmp_path, 4096)
    gpu = Gpu("made-up", gigabytes * 10**9)

    def decided(tokens: int | None) -> ModelConfig:
        model = {"max_micro_batch_tokens": tokens, **own}
        urls = {"urls": ("http://127.0.0.1:1",)}
        return fitted(config(tmp_path, model=model, engine=urls), [gpu]).model

    usual, chosen = decided(8192), decided(None)
    tokens = chosen.max_micro_batch_tokens
    assert tokens is not None
    assert chosen == usual.model_copy(update={"max_micro_batch_tokens": tokens})
    if filled:  # nothing is recomputed or moved, and with one more step of tokens it would be
        assert not chosen.gradient_checkpointing
        assert 8192 < tokens < device_plan.MOST_TOKENS
        more = decided(tokens + device_plan.STEP_TOKENS)
        assert more.gradient_checkpointing or more.prefix_gib is not None
    else:
        assert chosen.gradient_checkpointing


def test_prefixes_have_the_room_that_is_left_and_the_rest_of_them_is_in_the_machines_memory(
    model: Path, tmp_path: Path
) -> None:
    settings = load_settings(model)
    settings.max_position_embeddings = tokens = 32768
    settings.save_pretrained(tmp_path)

    def plan(gib: float, **own: float) -> DevicePlan:
        sections = {"engine": {"urls": ("http://127.0.0.1:1",)}}
        keys = {"gradient_checkpointing": False, "max_micro_batch_tokens": tokens, **own}
        return planned(tmp_path, [Gpu("made-up", int(gib * GIB))], model=keys, **sections)

    beside = (device_plan.CONTEXT_BYTES + device_plan.MARGIN_BYTES) / GIB
    roomy = plan(24)
    assert roomy.rank is not None
    longest, total = roomy.rank.longest_prefix / GIB, roomy.rank.total / GIB
    assert roomy.prefix_gib is None
    assert roomy.rank.kept_prefix / GIB == longest > 0.9
    assert sum(roomy.rank.parts().values()) == roomy.rank.total
    assert not any("machine's memory" in line for line in roomy.describe())

    tight = plan(beside + total - longest / 2)
    assert tight.rank is not None
    assert tight.prefix_gib is not None
    assert longest / 2 - 0.1 <= tight.prefix_gib <= longest / 2
    assert tight.rank.total <= tight.gpus[0].usable - device_plan.CONTEXT_BYTES
    (line,) = tight.describe()
    assert "of it in the machine's memory" in line
    least = plan(beside + total - longest + 0.01)
    assert least.prefix_gib == 0
    with pytest.raises(ConfigError, match=r"prefixes 1\.5 GiB.*model\.prefix_gib=0"):
        plan(beside + total - longest / 2, prefix_gib=longest)


@pytest.mark.parametrize("count", [0, 2])
def test_planned_configuration_with_offloaded_activations_is_read_again(
    model: Path, count: int
) -> None:
    gpus = [LARGE] * count
    found = fitted(config(model, model={"activation_offload": True}), gpus)
    again = RanksConfig.model_validate_json(found.model_dump_json())
    assert again.model.gradient_checkpointing
    plan = plan_devices(again, gpus)
    assert plan == plan_devices(config(model, model={"activation_offload": True}), gpus)
    assert plan is None or plan.checkpointing


def test_sleeping_engines_share_also_where_there_are_more_gpus(model: Path) -> None:
    plan = planned(model, [LARGE] * 4, engine={"sleep": True, "replicas": 2})
    assert plan.engines == ((0,), (1,))


def test_a_rank_on_a_chosen_gpu_leaves_the_others_to_engines(model: Path) -> None:
    plan = planned(model, [LARGE] * 3, trainer={"device": "cuda:1"}, engine={"replicas": 2})
    assert (plan.ranks, plan.engines) == ((1,), ((0,), (2,)))


@pytest.mark.parametrize(
    ("sections", "count", "memory", "message"),
    [
        ({"trainer": {"ranks": 3}}, 2, 16, r"trainer\.ranks=3, .*: 3 on this .* has 2 GPUs"),
        (
            {"trainer": {"mode": "separate", "ranks": 2}, "engine": {"replicas": 2}},
            3,
            16,
            r"engines: 2 \(engine\.replicas=2, 1 each\), .*ranks: 2 .* machine has 3; .*colocated$",
        ),
        (
            {"model": {"gradient_checkpointing": False}},
            2,
            2,
            r"a rank needs .* GiB of the 1\.0 GiB .*\(weights .*gradient_checkpointing",
        ),
        ({}, 2, 2, r"a rank needs .* GiB of the 1\.0 GiB .*\(weights (?!.*checkpointing)"),
        (
            {"engine": {"gpu_memory_share": 0.9}},
            1,
            16,
            r"gpu_memory_share=0\.9: a rank .* use at most 0\.\d+, or engine\.sleep=true",
        ),
        ({"engine": {"max_context_tokens": 400_000}}, 2, 16, r"a rank needs .* GiB of"),
        (
            {"engine": {"gpu_memory_share": 0.1}},
            2,
            16,
            r"an engine needs 2\.\d GiB on each .* gets 1\.6 GiB; use .*--tensor-parallel-size",
        ),
        (
            {"engine": {"args": ("-tp", "3")}},
            4,
            16,
            r"size 3 does not divide the 8 atten",
        ),
        (
            {"engine": {"replicas": 4}},
            2,
            16,
            r"GPUs for engines: 4 .*, but this machine has 2; lower them$",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    model: Path, sections: dict[str, Any], count: int, memory: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_devices(config(model, **sections), [Gpu("made-up", memory * GIB)] * count)


def test_runs_that_use_no_gpu_have_no_plan(model: Path) -> None:
    assert plan_devices(config(model), []) is None
    assert plan_devices(config(model, trainer={"device": "cpu"}), [LARGE]) is None
    own = {"env": {"CUDA_VISIBLE_DEVICES": "3"}}
    assert plan_devices(config(model, engine=own), [LARGE]) is None


@pytest.mark.parametrize(("transfer", "sleep"), [("nccl", False), ("shm", True)])
def test_what_needs_a_gpu_is_refused_where_there_is_none(
    model: Path, transfer: str, sleep: bool
) -> None:
    engine = {"weight_transfer": transfer, "sleep": sleep}
    with pytest.raises(ConfigError, match="GPU here"):
        plan_devices(config(model, engine=engine), [])


def test_only_the_ranks_that_torchrun_starts_on_this_machine_need_its_gpus(model: Path) -> None:
    sections = {"trainer": {"ranks": 4, "mode": "separate"}}
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    plan = plan_devices(
        config(model, **sections), [LARGE] * 3, torchrun | {"LOCAL_WORLD_SIZE": "2"}
    )
    assert plan is not None
    assert (plan.ranks, plan.engines) == ((0, 1), ((2,),))
    assert plan.rank == planned(model, [LARGE] * 5, **sections).rank
    with pytest.raises(ConfigError, match=r"trainer\.ranks=4, .*: 4 on this machine, which has 3"):
        plan_devices(config(model, **sections), [LARGE] * 3, {})


@pytest.mark.parametrize(("on_this_machine", "checkpoints"), [("4", False), ("2", True)])
def test_ranks_on_several_machines_do_not_differ_in_gradient_checkpointing(
    model: Path, on_this_machine: str, checkpoints: bool
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    environment = torchrun | {"LOCAL_WORLD_SIZE": on_this_machine}
    given = config(model, trainer={"ranks": 4, "mode": "separate"})
    run = fitted(given, [LARGE] * 5, environment)
    assert run.model.gradient_checkpointing is checkpoints


def test_machine_without_rank_0_needs_no_gpus_for_engines(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    torchrun["LOCAL_RANK"] = "1"
    monkeypatch.setattr(start, "gpus_here", lambda: [LARGE] * 2)
    ranks = config(
        model, trainer={"ranks": 4, "mode": "separate"}, engine={"replicas": 2, "sleep": False}
    )
    given = ProcessesConfig.model_validate(ranks.model_dump())
    other = start._fitted_follower(given, Seat(3, 4, "file:///a", 1), torchrun | {"RANK": "3"})
    assert other.engine == given.engine
    with pytest.raises(ConfigError, match="GPUs for engines: 2"):
        start._fitted_follower(given, Seat(1, 4, "file:///a", 1), torchrun | {"RANK": "1"})


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ((), 1),
        (("--tensor-parallel-size=4",), 4),
        (("--seed", "1", "-tp", "2"), 2),
        (("--tensor_parallel_size", "2"), 2),
        (("--tensor-parallel", "2", "-pp", "1"), 2),
        (("-tp=2", "-tp=4"), 4),
    ],
)
def test_tensor_parallel_size_of_vllms_arguments(args: tuple[str, ...], size: int) -> None:
    assert EnginesConfig(args=args).tensor_parallel == size


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-tp", "x"), "--tensor-parallel-size 'x' is not a number of GPUs"),
        (("-tp 2",), "'-tp 2' is one argument; write"),
        (("-tp",), "--tensor-parallel-size '' is not a number of GPUs"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2: an engine gets weights"),
        (("-dp=2",), "--data-parallel-size 2: an engine gets weights only if"),
        (("--gpu_memory_utilization", "0.5"), "use engine.gpu_memory_share"),
        (("--max-model-len", "4096"), "use engine.max_context_tokens"),
    ],
)
def test_arguments_that_the_plan_would_not_know_are_refused(
    args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        EnginesConfig(args=args)


def test_engine_process_sees_its_own_gpus_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(local, "gpus_here", lambda: (LARGE,) * 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,7")
    settings = {"model": {"path": model}, "engine": {"replicas": 2}}
    cluster = LocalCluster(
        ProcessesConfig.model_validate(settings),
        RunFolder.create(tmp_path / "run"),
        None,  # type: ignore[arg-type]
    )
    monkeypatch.setattr(
        local,
        "replica_server",
        lambda *args, **more: made.append(replica_server(*args, **more)),
    )
    for number in range(2):
        cluster.replica(number)
    engines = [each.args[0] for each in made]
    assert [each.env[device_plan.VISIBLE] for each in engines] == ["GPU-a", "7"]


def test_host_tier_is_in_the_plan_and_not_more_than_the_machine_has(model: Path) -> None:
    args = ("--kv-offloading-size", "0.5")
    plan = planned(model, [LARGE] * 2, engine={"args": args})
    assert plan.engine.host_tier == 2**29
    assert "; host tier of 0.5 GiB, about 32,768 tokens" in list(plan.describe())[1]
    with pytest.raises(ConfigError, match=r"--kv-offloading-size: 2 engines would use 2000000\.0"):
        planned(model, [LARGE] * 3, engine={"args": ("--kv-offloading-size=1e6",), "replicas": 2})
    with pytest.raises(ConfigError, match="--kv-offloading-size: the engines use no GPU here"):
        plan_devices(config(model, engine={"args": args}), [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kv-offloading-backend", "lmcache"), "--kv-offloading-backend lmcache: after an upd"),
        (("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'), "NixlConnector: after an"),
        (
            (
                "--kv-transfer-config",
                '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": '
                '{"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}}',
            ),
            "secondary_tiers: after an update",
        ),
        (("--kv-transfer-config.kv_connector", "NixlConnector"), "as one JSON object"),
        (("--kv-transfer-config", "{"), "is not JSON"),
        (("--kv-offloading-size", "much"), "--kv-offloading-size 'much' is not a number of GiB"),
    ],
    ids=["lmcache", "connector", "disk", "parts", "no-json", "size"],
)
def test_caches_that_an_update_does_not_reset_are_refused(
    args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        EnginesConfig(args=args)


def test_connector_that_an_update_resets_is_accepted() -> None:
    extra = '{"kv_connector_extra_config": {"eviction_policy": "arc"}}'
    config = EnginesConfig(args=("--kv-offloading-size", "2", "--kv-transfer-config", extra))
    assert config.host_tier_gib == 2.0


class Card:
    """A simulated GPU: a caching allocator per process as torch's, and vLLM's own arithmetic at its
    start (`gpu_worker.py`, `request_memory`). Sizes in bytes."""

    def __init__(self, gpu: Gpu) -> None:
        self.memory = gpu.memory
        self.reserved: dict[str, int] = {}
        """By process, CUDA contexts included."""

    @property
    def free(self) -> int:
        return self.memory - sum(self.reserved.values())

    def reserve(self, process: str, size: int) -> None:
        """What a process holds from now on; the allocator keeps what was freed."""
        before = self.reserved.get(process, 0)
        assert size - before <= self.free, f"{process} is out of memory"
        self.reserved[process] = max(before, size)

    def empty_cache(self, process: str, allocated: int) -> None:
        """Keeps what is allocated, and the segments that are used in part."""
        self.reserved[process] = device_plan.CONTEXT_BYTES + allocated + allocated // 16

    def start_engine(self, plan: DevicePlan) -> int:
        """vLLM's start; returns the bytes of its cache."""
        assert plan.share is not None
        self.reserve("engine", device_plan.CONTEXT_BYTES)  # before vLLM looks what is free
        requested = -int(-self.memory * plan.share // 1)
        assert requested <= self.free, "Free memory is less than desired GPU memory utilization"
        fixed = plan.engine.fixed
        cache = requested - fixed if plan.kv_cache_gib is None else plan.kv_cache_gib * GIB
        self.reserve("engine", device_plan.CONTEXT_BYTES + fixed + cache)
        return cache

    def sleep(self) -> None:
        self.reserved["engine"] = device_plan.ASLEEP_BYTES


@pytest.mark.parametrize(
    ("memory_gib", "other_gib"), [(8, 0), (16, 0), (16, 1.5), (80, 30), (140, 1.5)]
)
@pytest.mark.parametrize("sleep", [False, True])
def test_everything_fits_on_a_shared_gpu_in_every_phase(
    model: Path, memory_gib: int, sleep: bool, other_gib: float
) -> None:
    memory, other = memory_gib * GIB, int(other_gib * GIB)
    gpu = Gpu("made-up", memory, memory - other)
    plan = planned(model, [gpu], engine={"sleep": sleep, "max_context_tokens": 2048})
    card, rank = Card(gpu), plan.rank
    assert rank is not None
    card.reserved["others"] = other
    peak = device_plan.CONTEXT_BYTES + rank.total
    card.reserve("rank", device_plan.CONTEXT_BYTES + rank.weights)
    card.start_engine(plan)
    awake = card.reserved["engine"]
    for _ in range(2):
        if sleep:
            card.sleep()
        card.reserve("rank", peak)
        card.empty_cache("rank", rank.resident)
        card.reserve("engine", awake)
    del card.reserved["engine"]  # it has died, and is started again
    card.start_engine(plan)
    assert card.free >= 0


def test_cache_that_the_rank_keeps_would_end_an_engines_start_without_empty_cache(
    model: Path,
) -> None:
    gpu = Gpu("made-up", 8 * GIB, 8 * GIB)
    plan = planned(model, [gpu], engine={"sleep": True})
    card, rank = Card(gpu), plan.rank
    assert rank is not None
    card.reserve("rank", device_plan.CONTEXT_BYTES + rank.total)
    with pytest.raises(AssertionError, match="less than desired"):
        card.start_engine(plan)
    card.empty_cache("rank", rank.resident)
    card.start_engine(plan)


def test_cache_is_what_the_run_can_use(model: Path) -> None:
    """An H200 of 139.81 GiB would otherwise hold millions of tokens of a small model."""
    h200 = Gpu("H200", int(139.81 * GIB))
    given = {"rollout": {"concurrency": 8}, "engine": {"max_context_tokens": 4096}}
    plan = planned(model, [h200], **given)
    per_token = 2 * 8 * 4 * 64 * 4  # keys and values of 8 layers, 4 heads of 64 in float32
    assert plan.engine.cache_per_token == per_token
    assert plan.kv_cache_gib == -(-2 * 8 * 4096 * per_token // GIB) == 1
    assert plan.share is not None
    assert plan.share < 0.05
    engine = plan.engine_config(EnginesConfig(), 0, "")
    assert (engine.kv_cache_gib, engine.gpu_memory_share) == (1, plan.share)
    own = planned(model, [h200], engine={"kv_cache_gib": 20, "max_context_tokens": 4096})
    assert own.kv_cache_gib == 20


def test_rank_and_engine_must_hold_the_checkpoints_own_context(tmp_path: Path, model: Path) -> None:
    settings = Qwen3Config.from_pretrained(model)
    settings.max_position_embeddings = 262_144
    settings.save_pretrained(tmp_path)
    two = [LARGE] * 2
    sections = {"engine": {"gpu_memory_share": 0.3}}
    with pytest.raises(ConfigError, match=r"a rank needs .* a smaller .*engine.max_context_tokens"):
        planned(tmp_path, two, **sections)
    with pytest.raises(ConfigError, match=r"one sequence of 262,144 tokens 4\.0 GiB.*max_context"):
        plan_devices(config(tmp_path, **sections), two, trains=False)
    assert planned(tmp_path, two, engine={"gpu_memory_share": 0.3, "max_context_tokens": 8192})


def test_trials_without_a_trainer_have_whole_gpus(model: Path) -> None:
    small = [Gpu("made-up", 5 * GIB)]
    sections: dict[str, Any] = {"engine": {"lora_rank": 8, "max_context_tokens": 4096}}
    sections["model"] = {"gradient_checkpointing": True, "max_micro_batch_tokens": 65536}
    with pytest.raises(ConfigError, match="a rank needs"):
        plan_devices(config(model, **sections), small)
    plan = plan_devices(config(model, **sections), small, trains=False)
    assert plan is not None
    assert (plan.ranks, plan.rank, plan.engines) == ((), None, ((0,),))
    assert plan.engine.adapters > 0
    assert "rank" not in next(plan.describe())
    without = plan_devices(config(model, engine={"max_context_tokens": 4096}), small, trains=False)
    assert without is not None
    assert without.engine.adapters == 0


def test_adapters_of_a_run_are_in_the_plan(model: Path) -> None:
    lora = {"lora": {"update": "adapter", "rank": 16}}
    plan = planned(model, [LARGE] * 2, model=lora)
    layer = (512 + 512) + 2 * (512 + 256) + (512 + 512) + 3 * (512 + 2048)  # q, k, v, o, gate…
    one = 16 * (8 * layer + 512 + 64000)
    assert plan.engine.adapters == 4 * one * 4  # engine.lora_slots, in float32
    assert "adapters" in list(plan.describe())[1]


class WithJudge(RanksConfig):
    judge: VllmConfig

    @property
    def served_judges(self) -> dict[str, Any]:
        return {"remote_agent.judge": self.judge}


def test_judges_are_planned_or_refused(model: Path) -> None:
    def plan(judge: dict[str, Any], environment: dict[str, str] | None = None) -> DevicePlan:
        given = {"path": model, "max_micro_batch_tokens": 2048}
        whole = WithJudge.model_validate({"model": given, "judge": judge})
        found = plan_devices(whole, [LARGE] * 3, environment or {})
        assert found is not None
        return found

    with pytest.raises(ConfigError, match=r"judge\.model: its server would take 92% of GPU 0"):
        plan({})
    assert (
        "judge, 92% of the memory"
        in list(plan({"env": {"CUDA_VISIBLE_DEVICES": "2"}}).describe())[2]
    )
    beside = plan({"gpu_memory_share": 0.3})
    assert "rank 0" in next(beside.describe())
    assert "judge, 30% of the memory" in next(beside.describe())
    with pytest.raises(ConfigError, match=r"a rank needs .* of the 1\.\d GiB that a GPU has"):
        plan({"gpu_memory_share": 0.8})
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    named = plan({"env": {"CUDA_VISIBLE_DEVICES": "6"}}, visible)
    assert "judge" in list(named.describe())[2]
    elsewhere = plan({"env": {"CUDA_VISIBLE_DEVICES": "7"}}, visible)
    assert "judge" not in "".join(elsewhere.describe())


def test_nccl_needs_an_engine_on_another_gpu_than_its_rank(model: Path) -> None:
    engine = {"weight_transfer": "nccl"}
    with pytest.raises(ConfigError, match=r"engine\.weight_transfer=nccl: .*; use shm"):
        planned(model, [LARGE], engine=engine)
    assert planned(model, [LARGE] * 2, engine=engine).engines == ((1,),)
