"""The critic: values of states, and updates towards their targets."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.trainer.policy.test_policy import make_batch, make_policy
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.learning.models import Models
from trainer.learning.steps import update_critic
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.critic import Critic
from trainer.policy.model_config import ModelConfig


def make_critic(checkpoint: Path, *, share_prefixes: bool = True) -> Critic:
    config = ModelConfig(path=checkpoint, max_micro_batch_tokens=96, share_prefixes=share_prefixes)
    critic = Critic(config, OptimizerConfig(lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(critic.module.head.weight, std=0.1, generator=generator)
    return critic


def test_value_depends_only_on_earlier_tokens(
    checkpoint: Path,
) -> None:
    batch, critic = make_batch(1), make_critic(checkpoint)
    values = critic.compute_values(batch)
    token = int((batch.sequence == 0).nonzero()[0])
    at = int(batch.position[token])
    batch.sequences[0][at:] += 1
    batch.sequences[0][at:] %= 90
    assert abs(float((critic.compute_values(batch) - values)[token])) < 1e-6
    batch.sequences[0][at - 1] = (batch.sequences[0][at - 1] + 1) % 90
    assert abs(float((critic.compute_values(batch) - values)[token])) > 1e-5


def test_values_are_the_same_with_shared_prefixes(checkpoint: Path) -> None:
    batch = make_batch(2)
    packed, shared = (
        make_critic(checkpoint, share_prefixes=share).compute_values(batch)
        for share in (False, True)
    )
    torch.testing.assert_close(packed, shared, atol=1e-5, rtol=0)


def test_updates_raise_the_explained_variance(checkpoint: Path) -> None:
    algorithm = Algorithm(
        AlgorithmConfig.model_validate(
            {"preset": "ppo", "critic": {"clip": None}, "epochs": 4, "mini_batches": 2}
        )
    )
    batch, critic = make_batch(3), make_critic(checkpoint)
    models = Models(make_policy(checkpoint), algorithm, critic)
    generator = torch.Generator().manual_seed(0)
    explained = []
    for _ in range(6):
        batch.values = critic.compute_values(batch)
        algorithm.compute_advantages(batch)
        metrics = update_critic(models, critic, batch, generator=generator)
        explained.append(metrics["explained_variance"])
    assert explained[-1] > max(0.5, explained[0])
