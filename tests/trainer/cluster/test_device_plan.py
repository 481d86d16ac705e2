"""Which GPU holds what, for lists of GPUs that this machine does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import Qwen3Config

from trainer import start
from trainer.cluster import device_plan, local
from trainer.cluster.device_plan import DevicePlan, Gpu, fitted, plan_devices
from trainer.cluster.local import LocalCluster
from trainer.cluster.local_engine import replica_server
from trainer.engine import EnginesConfig
from trainer.errors import ConfigError
from trainer.policy.parallel import Seat
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
    sections = {
        "trainer": {"ranks": 2, "mode": "separate"},
        "engine": {"replicas": 3, "args": ("--tensor-parallel-size", "2")},
    }
    plan = planned(model, [LARGE] * 8, **sections)
    assert (plan.ranks, plan.engines) == ((0, 1), ((2, 3), (4, 5), (6, 7)))
    assert plan.share is None
    lines = list(plan.describe())
    assert len(lines) == 8
    assert lines[0].startswith("GPU 0 (made-up 16, 16.0 GiB): rank 0, ")
    assert "engine 2 (1/2)" in lines[7]


def test_ranks_that_share_micro_batches_are_named_and_need_less(model: Path) -> None:
    sections = {"trainer": {"ranks": 4}, "engine": {"urls": ("http://127.0.0.1:1",)}}
    alone = planned(model, [LARGE] * 4, **sections)
    sections["trainer"] = {"ranks": 4, "context_parallel": 2}
    plan = planned(model, [LARGE] * 4, **sections)
    assert plan.rank.passes is not None
    assert alone.rank.passes is not None
    assert plan.rank.passes < 0.8 * alone.rank.passes
    lines = list(plan.describe())
    assert "rank 0, " in next(alone.describe())
    assert "rank 1 (part 2/2 of group 0), " in lines[1]
    assert "rank 2 (part 1/2 of group 1), " in lines[2]


def test_copies_of_the_weights_are_named_and_each_has_fewer_shards(model: Path) -> None:
    sections = {"trainer": {"ranks": 4}, "engine": {"urls": ("http://127.0.0.1:1",)}}
    alone = planned(model, [LARGE] * 4, **sections)
    sections["trainer"] = {"ranks": 4, "weight_copies": 2}
    plan = planned(model, [LARGE] * 4, **sections)
    assert plan.rank.resident == pytest.approx(2 * alone.rank.resident, rel=1e-6)
    assert plan.rank.passes == alone.rank.passes
    assert "rank 2 (copy 1 of the weights), " in list(plan.describe())[2]


def test_a_single_gpu_is_shared_by_what_each_needs(model: Path) -> None:
    plan = planned(model, [LARGE])
    assert (plan.ranks, plan.engines) == ((0,), ((0,),))
    assert plan.share is not None
    assert plan.share * LARGE.memory + plan.rank.total < LARGE.memory
    asleep = planned(model, [LARGE], engine={"sleep": True})
    assert asleep.share is not None
    assert asleep.share > plan.share


def test_gradient_checkpointing_is_on_where_a_rank_does_not_fit_without_it(model: Path) -> None:
    def decided(gib: float, **own: bool) -> bool | None:
        gpus = [Gpu("made-up", int(gib * GIB))] * 2
        return fitted(config(model, model=own), gpus).model.gradient_checkpointing

    off = planned(model, [LARGE] * 2, model={"gradient_checkpointing": False}).rank.total
    on = planned(model, [LARGE] * 2, model={"gradient_checkpointing": True}).rank.total
    assert on < off - GIB / 2
    between = 1 + (on + off) / 2 / GIB
    assert (decided(16), decided(between)) == (False, True)
    assert decided(16, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match=r"a rank needs .*model\.gradient_checkpointing=true"):
        decided(between, gradient_checkpointing=False)
    assert fitted(config(model), []).model.gradient_checkpointing is False


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
    assert plan is None or plan.checkpoints


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
            r"a rank needs .* GiB of a GPU's 2\.0 GiB \(weights .*gradient_checkpointing",
        ),
        ({}, 2, 2, r"a rank needs .* GiB of a GPU's 2\.0 GiB \(weights (?!.*checkpointing)"),
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
            r"an engine needs 2\.\d GiB on each .* gets 1\.6 GiB; use --tensor-parallel-size",
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


@pytest.mark.parametrize(("transfer", "sleep"), [("nccl", False), ("ipc", False), ("shm", True)])
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
    given = config(
        model, trainer={"ranks": 4, "mode": "separate"}, engine={"replicas": 2, "sleep": False}
    )
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
        local.ProcessesConfig.model_validate(settings),
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
