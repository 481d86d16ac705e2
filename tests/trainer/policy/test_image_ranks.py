"""Several ranks train rows with images like one rank; each keeps the frozen tower whole."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.trainer.policy.test_image_trees import StandIn, batch_of, settings_of, tree
from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.token_loss import Metrics
from trainer.learning import steps
from trainer.learning.models import Finish, Models, build_models, follow
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.parallelism import Parallelism
from trainer.policy.proof_on_copy import randomize

PROCESSOR = patch("trainer.extras.images.qwen.Processor", StandIn)


def models_of(path: Path, ranks: Ranks) -> Models:
    config = ModelConfig(path=path, max_micro_batch_tokens=40, vision="frozen")
    torch.manual_seed(0)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-2)
    settings = {"preset": "ppo", "mini_batches": 2}
    algorithm = AlgorithmConfig.model_validate(settings)
    return build_models(config, optimizer, algorithm, ranks=ranks)


def train(path: Path, ranks: Ranks) -> tuple[Metrics, dict[str, Tensor]]:
    models, metrics = models_of(path, ranks), Metrics()
    batch = batch_of(tree())
    batch.rewards = batch.trial_rewards = torch.linspace(0, 1, batch.num_rollouts)
    batch.returns = batch.rewards[batch.rollout]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        scores = steps.compute_logprobs(models, batch, temperature=1.0)
        batch.logprobs = scores.logprobs
        steps.compute_values(models, batch)
        models.algorithm.compute_advantages(batch)
        metrics |= steps.update(models, batch, temperature=1.0, version=0, generator=generator)
    with closing(models.weights()) as weights:
        return metrics, dict(weights)


def worker(rank: int, size: int, path: Path, folder: Path, divided: Parallelism) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    ranks = Ranks.of_process_group("cpu", divided)
    with PROCESSOR:
        if rank == 0:
            torch.save(train(path, ranks), folder / "results.pt")
            ranks.tell(Finish())
        else:
            follow(models_of(path, ranks))
    ranks.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "divided"),
    [
        ("qwen3_vl", Parallelism()),
        ("qwen3_5", Parallelism(context=2)),
        pytest.param("qwen3_5", Parallelism(), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(context=2), marks=pytest.mark.long),
        pytest.param("qwen3_vl", Parallelism(copies=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_train_images_like_one(tmp_path: Path, kind: str, divided: Parallelism) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(settings_of(kind))
    randomize(model)
    model.save_pretrained(tmp_path / "model")
    with PROCESSOR:
        expected_metrics, expected = train(tmp_path / "model", Ranks())
    mp.spawn(worker, (2, tmp_path / "model", tmp_path, divided), nprocs=2)
    metrics, weights = torch.load(tmp_path / "results.pt")
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    assert weights.keys() == expected.keys()
    assert not any("visual" in name for name in weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4, msg=name)
