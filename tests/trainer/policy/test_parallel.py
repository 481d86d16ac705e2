"""Gloo processes with sharded weights train like one process, each on its part of the batch, or
together on the same micro-batches; also with several copies of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_policy import make_batch
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.learning import steps
from trainer.learning.models import Finish, Models, build_models, follow
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism

KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "weights": {},
        "adapters": {"lora": LoraSettings(rank=2)},
        "offloaded": {"activation_offload": True},
        "bfloat16": {"weights_dtype": "bfloat16", "compute_dtype": "bfloat16"},
    }
)
"""What is trained, and where what belongs to it is kept."""


def models_of(checkpoint: Path, ranks: Ranks, kind: str) -> Models:
    config = ModelConfig(path=checkpoint, max_micro_batch_tokens=64, **KINDS[kind])
    torch.manual_seed(0)
    # SGD-like: a large epsilon, as Adam would turn rounding noise in tiny gradients into steps
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-2, offload=kind == "offloaded")
    settings: dict[str, Any] = {"preset": "ppo", "mini_batches": 2}
    if kind == "bfloat16":  # no ratio near a bound, over which rounding would move single tokens
        settings["loss"] = {"name": "ppo", "clip_low": 0.9, "clip_high": 9.0}
    algorithm = AlgorithmConfig.model_validate(settings)
    return build_models(config, optimizer, algorithm, ranks=ranks)


def train(checkpoint: Path, ranks: Ranks, kind: str) -> tuple[Metrics, dict[str, Tensor]]:
    """Two PPO updates with a critic, two mini-batches each; metrics and final weights."""
    models = models_of(checkpoint, ranks, kind)
    batch, metrics = make_batch(1), Metrics()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        steps.compute_logprobs(models, batch, temperature=1.0)
        steps.compute_values(models, batch)
        models.algorithm.compute_advantages(batch)
        metrics |= steps.update(models, batch, temperature=1.0, version=3, generator=generator)
    with closing(models.weights()) as weights:
        return metrics, dict(weights)


def worker(
    rank: int,
    size: int,
    checkpoint: Path,
    folder: Path,
    divided: Parallelism,
    kinds: Sequence[str],
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = Ranks.of_process_group("cpu", divided)
    if rank == 0:
        results = []
        for kind in kinds:
            results.append(train(checkpoint, ranks, kind))
            ranks.tell(Finish())
        torch.save(results, folder / "results.pt")
    else:
        for kind in kinds:
            follow(models_of(checkpoint, ranks, kind))
    ranks.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "divided", "kinds"),
    [
        (2, Parallelism(), tuple(KINDS)),
        (2, Parallelism(context=2), ("weights", "adapters")),
        (2, Parallelism(copies=2), ("weights", "adapters")),
        pytest.param(4, Parallelism(copies=2), ("weights", "adapters"), marks=pytest.mark.long),
        pytest.param(
            4, Parallelism(context=2, copies=2), ("weights", "adapters"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_several_processes_train_like_one(
    checkpoint: Path, tmp_path: Path, size: int, divided: Parallelism, kinds: Sequence[str]
) -> None:
    """With all weights trained, with adapters only, with moments and inputs of layers offloaded,
    and with weights in bfloat16, whose rounding differs between shards."""
    run_ranks(worker, size, checkpoint, tmp_path, divided, kinds, ranks=size)
    results = torch.load(tmp_path / "results.pt")
    for kind, (metrics, weights) in zip(kinds, results, strict=True):
        expected_metrics, expected_weights = train(checkpoint, Ranks(), kind)
        relative, absolute = (2e-2, 5e-3) if kind == "bfloat16" else (1e-5, 1e-6)
        assert metrics == pytest.approx(expected_metrics, rel=relative, abs=absolute)
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            expected = expected_weights[name]
            assert weight.dtype == expected.dtype
            torch.testing.assert_close(weight, expected, atol=absolute, rtol=relative, msg=name)


def test_ranks_of_a_group_are_consecutive_within_a_stage() -> None:
    divided = Parallelism(tensor=2, pipeline=2)
    assert divided.groups(8) == 2
    assert [divided.group_of(rank, 8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [Parallelism(context=2).group_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [Parallelism(expert=2).group_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
