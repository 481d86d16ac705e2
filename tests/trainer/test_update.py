"""An update from groups to weights, through every preset."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.trainer.test_policy import make_batch, make_policy
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.presets import PRESETS
from trainer.batch import Batch
from trainer.policy import Policy
from trainer.token_loss import Metrics
from trainer.update import update_policy


def prepared(policy: Policy, algorithm: Algorithm, seed: int = 1) -> Batch:
    batch = make_batch(seed)
    batch.prox_logprobs = policy.compute_logprobs(batch, temperature=1.0).logprobs
    batch.ref_logprobs = batch.prox_logprobs.clone()
    batch.logprobs = batch.prox_logprobs + 0.01 * torch.randn(
        batch.num_tokens, generator=torch.Generator().manual_seed(0)
    )
    if algorithm.needs_values:
        batch.values = torch.zeros(batch.num_tokens)
    algorithm.compute_advantages(batch)
    return batch


def update(policy: Policy, algorithm: Algorithm, batch: Batch) -> Metrics:
    return update_policy(
        policy,
        algorithm,
        batch,
        temperature=1.0,
        version=3,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_raises_the_log_probability_of_what_was_rewarded(
    checkpoint: Path, preset: str
) -> None:
    changes = {"advantage": {"k": 2}} if preset == "pass_at_k" else {}  # groups of 4: k < 4
    algorithm = Algorithm(AlgorithmConfig.model_validate({"preset": preset} | changes))
    policy = make_policy(checkpoint)
    batch = prepared(policy, algorithm)
    before = policy.compute_logprobs(batch, temperature=1.0).logprobs
    metrics = update(policy, algorithm, batch)
    after = policy.compute_logprobs(batch, temperature=1.0).logprobs
    assert metrics["update_steps"] == 1
    assert metrics["grad_norm"] > 0
    assert float(((after - before) * batch.advantages).sum()) > 0


def test_epochs_and_mini_batches_train_every_rollout_in_each_epoch(checkpoint: Path) -> None:
    algorithm = Algorithm(AlgorithmConfig(epochs=2, mini_batches=3))
    policy = make_policy(checkpoint)
    batch = prepared(policy, algorithm)
    shares = [s.tolist() for s in algorithm.mini_batches(batch, torch.Generator())]
    assert len(shares) == 6
    for epoch in (shares[:3], shares[3:]):
        assert sorted(i for share in epoch for i in share) == list(range(len(batch.sequences)))
        owners = [set(batch.sequence_rollout[share].tolist()) for share in epoch]
        assert not owners[0] & owners[1]
        assert not owners[1] & owners[2]
    assert update(policy, algorithm, batch)["update_steps"] == 6


def test_a_batch_without_a_signal_makes_no_step(checkpoint: Path) -> None:
    algorithm = Algorithm(AlgorithmConfig(groups="with_signal"))
    policy = make_policy(checkpoint)
    batch = prepared(policy, algorithm)
    batch.rewards = torch.ones(batch.num_rollouts)
    before = copy.deepcopy(policy.model.state_dict())
    assert update(policy, algorithm, batch) == {"update_steps": 0.0}
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, before[name])
