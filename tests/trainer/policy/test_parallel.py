"""Two gloo processes with sharded weights train like one process, each on its part of the batch, or
both on the same micro-batches."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.trainer.policy.test_policy import make_batch
from trainer import steps
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.models import Finish, Models, build_models, follow
from trainer.optimizer import OptimizerConfig
from trainer.policy.model import LoraSettings, ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism


def models_of(checkpoint: Path, ranks: Ranks, lora: bool) -> Models:
    config = ModelConfig(
        path=checkpoint, max_micro_batch_tokens=64, lora=LoraSettings(rank=2) if lora else None
    )
    torch.manual_seed(0)
    # SGD-like: a large epsilon, as Adam would turn rounding noise in tiny gradients into steps
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-2)
    algorithm = AlgorithmConfig.model_validate({"preset": "ppo", "mini_batches": 2})
    return build_models(config, optimizer, algorithm, ranks=ranks)


def train(checkpoint: Path, ranks: Ranks, lora: bool) -> tuple[Metrics, dict[str, Tensor]]:
    """Two PPO updates with a critic, two mini-batches each; metrics and final weights."""
    models = models_of(checkpoint, ranks, lora)
    batch, metrics = make_batch(1), Metrics()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        steps.compute_logprobs(models, batch, temperature=1.0)
        steps.compute_values(models, batch)
        models.algorithm.compute_advantages(batch)
        metrics |= steps.update(models, batch, temperature=1.0, version=3, generator=generator)
    with closing(models.weights()) as weights:
        return metrics, dict(weights)


def worker(rank: int, checkpoint: Path, folder: Path, context: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    ranks = Ranks.of_process_group("cpu", Parallelism(context))
    if rank == 0:
        results = []
        for lora in (False, True):
            results.append(train(checkpoint, ranks, lora))
            ranks.tell(Finish())
        torch.save(results, folder / "results.pt")
    else:
        for lora in (False, True):
            follow(models_of(checkpoint, ranks, lora))
    ranks.leave()


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_two_processes_train_like_one(checkpoint: Path, tmp_path: Path, context: int) -> None:
    """Both with all weights trained and with adapters only."""
    mp.spawn(worker, (checkpoint, tmp_path, context), nprocs=2)
    results = torch.load(tmp_path / "results.pt")
    for lora, (metrics, weights) in zip((False, True), results, strict=True):
        expected_metrics, expected_weights = train(checkpoint, Ranks(), lora)
        assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-4)
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            expected = expected_weights[name]
            torch.testing.assert_close(weight, expected, atol=1e-4, rtol=1e-3, msg=name)


def test_ranks_of_a_group_are_consecutive_within_a_stage() -> None:
    divided = Parallelism(tensor=2, pipeline=2)
    assert divided.groups(8) == 2
    assert [divided.group_of(rank, 8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [Parallelism(context=2).group_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [Parallelism(expert=2).group_of(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
