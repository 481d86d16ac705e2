"""Correction, divergences, shaping, value losses and weights compared with float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.advantages import turn_rewards
from trainer.algorithms.aggregation import AGGREGATIONS, RolloutMean
from trainer.algorithms.correction import (
    BinaryDivergence,
    Divergence,
    Level,
    Mask,
    Scope,
    Truncate,
    Veto,
)
from trainer.algorithms.kl import ESTIMATORS, AdaptiveKl
from trainer.algorithms.returns import reward_to_go
from trainer.algorithms.shaping import Overlong, RewardShaping
from trainer.algorithms.value_losses import CriticConfig, explained_variance

Array = NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)


def random_columns(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    return rng.normal(0, 0.5, size), np.sort(rng.integers(0, 6, size))


def spread(values: Array, sequence: Array, function: Callable[[Array], float]) -> Array:
    return np.array([function(values[sequence == s]) for s in sequence])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_truncated_and_masked_weights_match_numpy_at_every_level(level: Level, seed: int) -> None:
    log_w, sequence = random_columns(seed)
    over: dict[str, Callable[[Array], float]] = {"sequence": np.sum, "geometric": np.mean}
    raw = np.exp(log_w if level == "token" else spread(log_w, sequence, over[level]))
    columns = (torch.as_tensor(log_w), torch.as_tensor(sequence))
    truncated = Truncate(level=level, upper=1.3).weights(*columns).numpy()
    np.testing.assert_allclose(truncated, np.minimum(raw, 1.3), rtol=1e-12)
    masked = Mask(level=level, lower=0.7, upper=1.3).weights(*columns).numpy()
    np.testing.assert_allclose(masked, np.where((raw >= 0.7) & (raw <= 1.3), raw, 0), rtol=1e-12)


K: dict[str, Callable[[Array], Array]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x**2,
    "k3": lambda x: np.exp(-x) - 1 + x,
    "abs": np.abs,
}
K_GRADIENT: dict[str, Callable[[Array], Array]] = {
    "k1": np.ones_like,
    "k2": lambda x: x,
    "k3": lambda x: 1 - np.exp(-x),
    "abs": np.sign,
}


@pytest.mark.parametrize("estimator", K)
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_kl_estimators_and_their_gradients_match_numpy(estimator: str, seed: int) -> None:
    k1 = random_columns(seed)[0]
    logp = torch.as_tensor(k1 - 3).requires_grad_()
    value = ESTIMATORS.parse(estimator).divergence(logp, torch.full_like(logp, -3))
    value.sum().backward()
    np.testing.assert_allclose(value.detach().numpy(), K[estimator](k1), atol=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), K_GRADIENT[estimator](k1), atol=1e-12)


@pytest.mark.parametrize("scope", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_rejection_by_divergence_matches_numpy(estimator: str, scope: Scope, seed: int) -> None:
    log_w, sequence = random_columns(seed)
    estimate = K[estimator](-log_w)
    over: dict[str, Callable[[Array], float]] = {
        "sequence_sum": np.sum,
        "sequence_mean": np.mean,
        "sequence_max": np.max,
    }
    if scope != "token":
        estimate = spread(estimate, sequence, over[scope])
    lower = -0.2 if estimator == "k1" else None
    expected = (estimate <= 0.1) & (estimate >= (-np.inf if lower is None else lower))
    part = Divergence(estimator=estimator, scope=scope, lower=lower, upper=0.1)
    got = part.keeps(torch.as_tensor(log_w), torch.as_tensor(sequence))
    assert (got.numpy() == expected).all()


@settings(max_examples=50, deadline=None)
@given(p=st.floats(1e-6, 1 - 1e-6), q=st.floats(1e-6, 1 - 1e-6), upper=st.floats(1e-4, 1))
def test_rejection_by_binary_divergence_is_kpops(p: float, q: float, upper: float) -> None:
    there, back = (
        a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))
    )
    behaviour, prox = torch.tensor([p]).double().log(), torch.tensor([q]).double().log()
    near = abs(max(there, back) - upper) < 1e-9
    part = BinaryDivergence(upper=upper)
    kept = part.keeps_of(prox - behaviour, torch.tensor([0]), behaviour)
    assert near or kept.item() == (max(there, back) <= upper)


def test_certain_token_is_kept_and_one_that_became_certain_is_not() -> None:
    behaviour, log_w = torch.tensor([0.0, -1.0, -20.0]), torch.tensor([0.0, 1.0, 5.0])
    kept = BinaryDivergence(upper=0.1).keeps_of(log_w, torch.zeros(3), behaviour)
    assert kept.tolist() == [True, False, True]  # the last one is rare, at a ratio of 148


def test_veto_drops_the_whole_sequence() -> None:
    log_w, sequence = torch.tensor([0.1, -12.0, 0.0, -5.0]), torch.tensor([0, 0, 1, 1])
    kept = Veto(min_ratio=1e-4).keeps(log_w, sequence)
    assert kept.tolist() == [False, False, True, True]


def loss_by_hand(kind: str, per_token: Array, sequence: Array, rollout: Array) -> float:
    if kind == "token_mean":
        return float(per_token.mean())
    owner = rollout if kind == "rollout_mean" else sequence
    parts = [per_token[owner == o] for o in np.unique(owner)]
    if kind == "sequence_mean_token_sum_norm":
        return float(np.mean([part.sum() / 50 for part in parts]))
    return float(np.mean([part.mean() for part in parts]))


KINDS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
    "rollout_mean",
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_weighted_sums_match_the_means_of_each_aggregation(kind: str, seed: int) -> None:
    values, sequence = random_columns(seed)
    rollout = sequence // 2
    norm = {"max_tokens": 50} if kind == "sequence_mean_token_sum_norm" else {}
    part = AGGREGATIONS.parse({"name": kind} | norm)
    weights = part.weights(torch.as_tensor(sequence), torch.as_tensor(rollout))
    got = float((weights.double() * torch.as_tensor(values)).sum())
    np.testing.assert_allclose(got, loss_by_hand(kind, values, sequence, rollout), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_weight_of_a_rollout_does_not_depend_on_its_forks(seed: int) -> None:
    """A rollout's share of the loss is 1 / R, however its tokens are spread over sequences."""
    rng = np.random.default_rng(seed)
    rollout = np.sort(rng.integers(0, 5, 30))
    sequence = np.unique(rollout * 40 + rng.integers(0, 1 + rng.integers(0, 40), 30))
    sequence = np.sort(rng.choice(sequence, 30))
    weights = RolloutMean().weights(torch.as_tensor(sequence), torch.as_tensor(rollout))
    shares = [float(weights[rollout == r].sum()) for r in np.unique(rollout)]
    np.testing.assert_allclose(shares, 1 / len(shares), rtol=1e-5)


@pytest.mark.parametrize("huber", [None, 0.3])
@pytest.mark.parametrize("clip", [None, 0.2])
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_value_loss_and_its_gradient_match_numpy(
    clip: float | None, huber: float | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values, old, goal = rng.normal(0, 0.5, (3, 20))

    def error(v: Array) -> tuple[Array, Array]:
        d = v - goal
        if huber is None:
            return 0.5 * d**2, d
        inside = np.abs(d) <= huber
        loss = np.where(inside, 0.5 * d**2, huber * (np.abs(d) - 0.5 * huber))
        return loss, np.where(inside, d, huber * np.sign(d))

    loss, gradient = error(values)
    if clip is not None:
        near = old + np.clip(values - old, -clip, clip)
        loss2, gradient2 = error(near)
        free = np.abs(values - old) <= clip
        worse = loss2 > loss
        loss, gradient = np.maximum(loss, loss2), np.where(worse, gradient2 * free, gradient)
    v = torch.as_tensor(values).requires_grad_()
    critic = CriticConfig(clip=clip, huber_delta=huber)
    got = critic.losses(v, torch.as_tensor(old), torch.as_tensor(goal))
    got.losses.sum().backward()
    np.testing.assert_allclose(got.losses.detach().numpy(), loss, atol=1e-12)
    away_from_kink = np.abs(np.abs(values - old) - (clip or 9)) > 1e-6
    np.testing.assert_allclose(v.grad.numpy()[away_from_kink], gradient[away_from_kink], atol=1e-9)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant() -> None:
    goal = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(goal, goal) == 1
    assert explained_variance(torch.ones(3), goal) == 0
    assert explained_variance(goal, torch.ones(3)) == 0


def test_rewards_are_scaled_clipped_and_penalised_for_length() -> None:
    rewards = torch.tensor([-3.0, 0.0, 3.0])
    shaped = RewardShaping(bias=1, scale=2, low=-1, high=5).shaped(rewards)
    assert shaped.tolist() == [-1, 2, 5]
    tokens = torch.tensor([50.0, 80.0, 90.0, 100.0, 110.0])
    penalty = Overlong(max_tokens=100, buffer_tokens=20, factor=0.5).penalty(tokens)
    assert penalty.tolist() == [0, 0, -0.25, -0.5, -0.75]


def test_turn_rewards_sum_to_the_returns_of_the_turns() -> None:
    returns = torch.tensor([3.0, 3.0, 1.0, 5.0, 5.0])
    sequence, turns = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 1])
    rewards = turn_rewards(returns, sequence, turns)
    assert rewards.tolist() == [0, 2, 1, 0, 5]


def test_adaptive_kl_coefficient_follows_its_target() -> None:
    assert AdaptiveKl(target=0.05, horizon=10).adapted(0.1, 0.5) == pytest.approx(0.1 * 1.02)
    assert AdaptiveKl(target=0.05, horizon=10).adapted(0.1, 0.0) == pytest.approx(0.1 * 0.98)
    assert AdaptiveKl(target=0.05, horizon=10).adapted(0.1, 0.05) == 0.1


@pytest.mark.parametrize(("adaptive", "expected"), [(None, 0.3), ({"target": 0.05}, 0.1)])
def test_continued_run_has_its_own_coefficient_unless_it_is_adaptive(
    adaptive: object, expected: float
) -> None:
    kl = {"coefficient": 0.3, "adaptive": adaptive}
    algorithm = Algorithm(AlgorithmConfig.model_validate({"kl": kl}))
    algorithm.load_state_dict({"kl_coefficient": 0.1})
    assert algorithm.kl_coefficient == expected


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_reward_to_go_is_the_sum_from_the_token_to_the_end_of_its_sequence(seed: int) -> None:
    rewards, sequence = random_columns(seed)
    got = reward_to_go(torch.as_tensor(rewards), torch.as_tensor(sequence))
    expected = [rewards[t:][sequence[t:] == sequence[t]].sum() for t in range(len(rewards))]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
