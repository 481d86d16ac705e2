"""Updates of the policy from a batch, with every preset."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.policy.test_policy import make_batch, make_policy
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.correction import Correction
from trainer.algorithms.presets import PRESETS
from trainer.algorithms.token_loss import LossFunction, Metrics, TokenLoss
from trainer.batch import Batch, build_batch
from trainer.errors import TrainingError
from trainer.learning.models import Models
from trainer.learning.steps import update_policy
from trainer.policy.policy import Policy


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
        Models(policy, algorithm),
        batch,
        temperature=1.0,
        version=3,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_raises_the_log_probability_of_rewarded_tokens(
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
    assert batch.advantages is not None
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


def test_batch_of_equal_rewards_is_not_trained_with_groups_with_signal(checkpoint: Path) -> None:
    algorithm = Algorithm(AlgorithmConfig(groups="with_signal"))
    policy = make_policy(checkpoint)
    batch = prepared(policy, algorithm)
    batch.rewards = batch.trial_rewards = torch.full((batch.num_rollouts,), 0.7)
    batch.returns = batch.shares * 0.7
    before = copy.deepcopy(policy.model.state_dict())
    assert update(policy, algorithm, batch) == {"update_steps": 0.0}
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_error_for_a_gradient_that_is_not_finite_names_rollout_and_turn(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, policy = Algorithm(AlgorithmConfig()), make_policy(checkpoint)
    batch = prepared(policy, algorithm)
    bad = batch.num_tokens // 2
    honest = algorithm.loss

    def broken(*args: Any, **kwargs: Any) -> LossFunction:
        loss = honest(*args, **kwargs)

        def function(logprobs: Tensor, entropy: Tensor, targets: Tensor) -> TokenLoss:
            result = loss(logprobs, entropy, targets)
            result.losses.register_hook(lambda g: g.masked_fill(targets == bad, torch.inf))
            return result

        return function

    monkeypatch.setattr(algorithm, "loss", broken)
    before = copy.deepcopy(policy.model.state_dict())
    with pytest.raises(TrainingError, match=f"{batch.name(bad)}: the gradient's norm is nan"):
        update(policy, algorithm, batch)
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_empty_batch_is_refused(checkpoint: Path) -> None:
    with pytest.raises(TrainingError, match="no token to train"):
        Algorithm(AlgorithmConfig()).compute_advantages(build_batch([]))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), parts=st.integers(2, 5))
def test_rollout_that_forks_has_the_same_weight_as_one_that_does_not(
    checkpoint: Path, seed: int, parts: int
) -> None:
    """Splitting the tokens of a rollout over several sequences changes neither its advantages nor
    its share of the loss."""
    batch = make_batch(seed, segments=1)
    generator = torch.Generator().manual_seed(seed)
    forked = copy.copy(batch)
    pieces = torch.randint(0, parts, (batch.num_tokens,), generator=generator)
    pieces[batch.rollout != 2] = 0
    order = torch.argsort(batch.sequence * parts + pieces, stable=True)
    forked.sequence = (batch.sequence * parts + pieces)[order]
    forked.sequence_rollout = batch.sequence_rollout.repeat_interleave(parts)
    forked.sequences = tuple(ids for ids in batch.sequences for _ in range(parts))
    for name in ("position", "ids", "turns", "logprobs", "versions", "returns", "shares"):
        setattr(forked, name, getattr(batch, name)[order])
    algorithm = Algorithm(AlgorithmConfig(prox="behaviour", correction=Correction(weight=None)))
    shares = []
    for each in (batch, forked):
        algorithm.compute_advantages(each)
        losses = algorithm.loss(each)(
            each.logprobs, torch.zeros(each.num_tokens), torch.arange(each.num_tokens)
        ).losses
        shares.append(torch.zeros(each.num_rollouts).index_add(0, each.rollout, losses))
    torch.testing.assert_close(*shares)
