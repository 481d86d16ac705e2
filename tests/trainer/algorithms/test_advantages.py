"""Advantages against float64 NumPy, group by group; statistics that count rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithms import advantages as adv
from trainer.algorithms.advantages import Baseline

Array = NDArray[np.float64]


def std(values: Array) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def per_group(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def whole(rewards: Array, group: Array, tokens: Array) -> Array:
        out = np.zeros_like(rewards)
        for g in np.unique(group):
            own = group == g
            out[own] = function(rewards[own], tokens[own])
        return out

    return whole


def loo(rewards: Array, _tokens: Array) -> Array:
    if len(rewards) == 1:
        return np.zeros(1)
    return np.array([r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)])


def pass_at_2(rewards: Array, _tokens: Array) -> Array:
    size, correct = len(rewards), int((rewards >= 0.5).sum())
    k = min(2, size)
    rho = 1 - math.comb(size - correct, k) / math.comb(size, k)
    sigma = math.sqrt(rho * (1 - rho))
    if sigma == 0:
        return np.zeros(size)
    others = math.comb(max(size - correct - 1, 0), k - 1) / math.comb(size - 1, k - 1)
    return np.where(rewards >= 0.5, (1 - rho) / sigma, (1 - rho - others) / sigma)


centred = per_group(lambda r, _: r - r.mean())
EPS = 1e-6
Estimator = Callable[[Tensor, Tensor, Tensor], Baseline | Tensor]
CASES: dict[str, tuple[Estimator, Callable[..., Array]]] = {
    "grpo": (
        lambda r, g, _: adv.grpo(r, g, eps=EPS),
        per_group(lambda r, _: (r - r.mean()) / (std(r) + EPS)),
    ),
    "dr_grpo": (lambda r, g, _: adv.dr_grpo(r, g), centred),
    "rloo": (lambda r, g, _: adv.rloo(r, g), per_group(loo)),
    "reinforce++": (
        lambda r, _g, _t: adv.reinforce_pp(r, eps=EPS),
        lambda r, _g, _t: (r - r.mean()) / (std(r) + EPS),
    ),
    "reinforce++_baseline": (
        lambda r, g, _: adv.reinforce_pp_baseline(r, g, eps=EPS),
        lambda r, g, t: centred(r, g, t) / (std(centred(r, g, t)) + EPS),
    ),
    "lite_ppo": (
        lambda r, g, _: adv.lite_ppo(r, g, eps=EPS),
        lambda r, g, t: centred(r, g, t) / (std(r) + EPS),
    ),
    "opo": (adv.opo, per_group(lambda r, n: r - (r * n).sum() / n.sum())),
    "gpg": (
        lambda r, g, _: adv.gpg(r, g),
        lambda r, g, t: (
            centred(r, g, t)
            * len(r)
            / max(1, sum((r[g == x] != r[g == x][0]).any() * (g == x).sum() for x in np.unique(g)))
        ),
    ),
    "pass_at_k": (
        lambda r, g, _: adv.pass_at_k(r, g, k=2, threshold=0.5),
        per_group(pass_at_2),
    ),
    "accepted": (
        lambda r, _g, _t: adv.accepted(r, threshold=0.5),
        lambda r, _g, _t: (r >= 0.5) * 1.0,
    ),
}


def result(outcome: Baseline | Tensor, rewards: Tensor) -> Tensor:
    return outcome if isinstance(outcome, Tensor) else (rewards - outcome.mean) * outcome.scale


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_advantages_are_the_formulas_in_groups_of_any_size(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 24))
    group = np.unique(rng.integers(0, 6, size), return_inverse=True)[1]
    rewards = rng.choice([0.0, 0.25, 1.0], size)
    tokens = rng.integers(1, 50, size).astype(np.float64)
    function, oracle = CASES[name]
    inputs = (torch.as_tensor(rewards), torch.as_tensor(group), torch.as_tensor(tokens))
    got = result(function(*inputs), inputs[0])
    assert torch.isfinite(got).all()
    np.testing.assert_allclose(got.numpy(), oracle(rewards, group, tokens), atol=1e-9)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("reinforce++", "accepted")])
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    rewards, group = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 1, 1])
    got = result(CASES[name][0](rewards, group, torch.ones(3)), rewards)
    assert torch.isfinite(got).all()
    assert float(got[0]) == 0


def gae_oracle(
    rewards: Array, values: Array, sequence: Array, gamma: float, lam: float
) -> tuple[Array, Array]:
    advantages = np.zeros_like(values)
    for s in np.unique(sequence):
        next_value = next_advantage = 0.0
        for t in np.flatnonzero(sequence == s)[::-1]:
            delta = rewards[t] + gamma * next_value - values[t]
            advantages[t] = delta + gamma * lam * next_advantage
            next_value, next_advantage = values[t], advantages[t]
    return advantages, advantages + values


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_by_token_and_by_turn(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 30))
    sequence = np.sort(rng.integers(0, 4, size))
    turns = np.sort(rng.integers(0, 4, size))
    rewards, values = rng.normal(size=(2, size))
    columns = [torch.as_tensor(x) for x in (rewards, values, sequence)]
    got = adv.gae(*columns, gamma=gamma, lam=lam)
    for mine, expected in zip(got, gae_oracle(rewards, values, sequence, gamma, lam), strict=True):
        np.testing.assert_allclose(mine.numpy(), expected, atol=1e-9)

    pairs = list(dict.fromkeys(zip(sequence.tolist(), turns.tolist(), strict=True)))
    own = [(sequence == s) & (turns == t) for s, t in pairs]
    turn_rewards = np.array([rewards[mask].sum() for mask in own])
    turn_values = np.array([values[mask][0] for mask in own])
    turn_sequence = np.array([s for s, _ in pairs])
    expected_turn = gae_oracle(turn_rewards, turn_values, turn_sequence, gamma, lam)
    got = adv.gae_by_turn(*columns, torch.as_tensor(turns), gamma=gamma, lam=lam)
    for mine, expected in zip(got, expected_turn, strict=True):
        for mask, value in zip(own, expected, strict=True):
            np.testing.assert_allclose(mine.numpy()[mask], value, atol=1e-9)


def test_whitening_gives_mean_0_and_variance_1_per_rollout() -> None:
    values = torch.tensor([3.0, 3.0, 3.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    torch.testing.assert_close(
        adv.whiten(values, weights), torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    )
