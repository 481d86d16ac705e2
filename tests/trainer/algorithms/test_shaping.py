"""Rewards before advantages, and the terms that are added to the policy's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.algorithms.test_advantages import batch_of, trial
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.advantages import Grpo
from trainer.algorithms.kl import Distillation
from trainer.algorithms.shaping import RewardShaping
from trainer.batch import Batch


def shaped(**reward: Any) -> list[float]:
    """The shaped rewards of rollouts with rewards 1, 1 and 1 and 4, 8 and 12 trained tokens."""
    batch = batch_of([trial(str(i), 1.0, 1, tokens=4 * (i + 1)) for i in range(3)])
    config = AlgorithmConfig(reward=RewardShaping.model_validate(reward))
    return Algorithm(config)._shaped_rewards(batch)[0].tolist()


def test_overlong_penalty_grows_over_the_buffer_and_past_the_limit() -> None:
    overlong = {"max_tokens": 10, "buffer_tokens": 4, "factor": 0.5}
    assert shaped(overlong=overlong) == pytest.approx([1.0, 1 - 0.25, 1 - 0.75])


def test_overlong_penalty_is_added_after_the_bounds() -> None:
    overlong = {"max_tokens": 10, "buffer_tokens": 4}
    assert shaped(scale=3, high=2, overlong=overlong) == pytest.approx([2.0, 1.5, 0.5])


def test_eps_of_the_advantage_keeps_normalised_advantages_smaller() -> None:
    rollouts = [trial("a", 1.0, 1), trial("b", 0.0, 1)]
    largest = []
    for eps in (1e-6, 1.0):
        batch = batch_of(rollouts)
        Algorithm(AlgorithmConfig(advantage=Grpo(eps=eps))).compute_advantages(batch)
        largest.append(float(_of(batch.advantages).max()))
    deviation, spread = 0.5, 0.5 * 2**0.5
    assert largest == pytest.approx([deviation / spread, deviation / (spread + deviation)])


def loss_of(config: AlgorithmConfig, batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    algorithm = Algorithm(config)
    algorithm.compute_advantages(batch)
    entropy = torch.full((batch.num_tokens,), 2.0)
    return algorithm.loss(batch)(logprobs, entropy, torch.arange(batch.num_tokens)).losses.sum()


def prepared() -> Batch:
    batch = batch_of([trial("a", 1.0, 1), trial("b", 0.0, 1)])
    batch.prox_logprobs = torch.zeros(batch.num_tokens)
    return batch


def test_entropy_coefficient_subtracts_the_mean_entropy_from_the_loss() -> None:
    batch = prepared()
    logprobs = torch.zeros(batch.num_tokens)
    plain = loss_of(AlgorithmConfig(), batch, logprobs)
    with_bonus = loss_of(AlgorithmConfig(entropy_coefficient=0.1), batch, logprobs)
    assert float(plain - with_bonus) == pytest.approx(0.1 * 2.0)


@pytest.mark.parametrize(("estimator", "divergence"), [("k1", 0.5), ("k2", 0.125)])
def test_estimator_of_the_distillation_measures_the_divergence_from_the_teacher(
    estimator: str, divergence: float
) -> None:
    batch = prepared()
    batch.teacher_logprobs = torch.full((batch.num_tokens,), -0.5)
    logprobs = torch.zeros(batch.num_tokens)
    teacher = {"teacher": "teacher", "estimator": estimator, "coefficient": 2.0}
    config = AlgorithmConfig(distillation=Distillation.model_validate(teacher))
    added = loss_of(config, batch, logprobs) - loss_of(AlgorithmConfig(), batch, logprobs)
    assert float(added) == pytest.approx(2.0 * divergence)


def _of(column: torch.Tensor | None) -> torch.Tensor:
    assert column is not None
    return column
