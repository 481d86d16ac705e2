"""Advantages compared with float64 NumPy, group by group, and their common properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.advantages import ADVANTAGES, Advantage, Gae, PassAtK, group_mean, whiten
from trainer.algorithms.returns import Returns
from trainer.batch import Batch, build_batch

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
EPS = 1e-6
seeds = st.integers(0, 2**32 - 1)


def returns_of(rewards: Array, group: Any, tokens: Any, **changes: Any) -> Returns:
    """Rollouts of one turn and one sequence each, credited with their rewards."""
    rollout = torch.arange(len(rewards)).repeat_interleave(torch.as_tensor(tokens))
    zeros = torch.zeros(len(rollout), dtype=torch.float64)
    plain = Returns(
        rewards=torch.as_tensor(rewards).double(),
        trial_rewards=torch.as_tensor(rewards).double(),
        group=torch.as_tensor(group),
        tokens=torch.as_tensor(tokens).double(),
        rollout=rollout,
        sequence=rollout,
        turns=torch.zeros_like(rollout),
        share=zeros + 1,
        extra=zeros,
        kl_rewards=zeros,
    )
    return replace(plain, **changes)


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


def over(centred: Array, deviations: Array) -> Array:
    """`centred / (σ + ε)`, where ε is a share of the largest deviation."""
    if not deviations.any():
        return np.zeros_like(centred)
    return centred / (std(deviations) + EPS * np.abs(deviations).max())


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
CASES: dict[str, tuple[dict[str, Any], Callable[..., Array]]] = {
    "grpo": ({}, per_group(lambda r, _: over(r - r.mean(), r - r.mean()))),
    "dr_grpo": ({}, centred),
    "rloo": ({}, per_group(loo)),
    "reinforce++": ({}, lambda r, _g, _t: over(r - r.mean(), r - r.mean())),
    "reinforce++_baseline": ({}, lambda r, g, t: over(centred(r, g, t), centred(r, g, t))),
    "lite_ppo": ({}, lambda r, g, t: over(centred(r, g, t), r - r.mean())),
    "opo": ({}, per_group(lambda r, n: r - (r * n).sum() / n.sum())),
    "gpg": (
        {},
        lambda r, g, t: (
            centred(r, g, t)
            * len(r)
            / max(1, sum((r[g == x] != r[g == x][0]).any() * (g == x).sum() for x in np.unique(g)))
        ),
    ),
    "pass_at_k": ({"k": 2}, per_group(pass_at_2)),
    "tree": ({}, per_group(loo)),
    "accepted": ({}, lambda r, _g, _t: (r >= 0.5) * 1.0),
    "none": ({}, lambda r, _g, _t: 0.0 * r),
}
GROUPED = [name for name in CASES if ADVANTAGES.find(name).compares_within_group]
LINEAR = [name for name in CASES if name not in ("pass_at_k", "accepted", "tree")]


def part_of(name: str) -> Advantage:
    return ADVANTAGES.parse({"name": name} | CASES[name][0])


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_advantages_match_numpy_for_groups_of_any_size(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 24))
    group = np.unique(rng.integers(0, 6, size), return_inverse=True)[1]
    rewards = rng.choice([0.0, 0.25, 1.0], size)
    tokens = rng.integers(1, 50, size)
    returns = returns_of(rewards, group, tokens)
    got = part_of(name).estimate(returns).advantages.numpy()
    expected = CASES[name][1](rewards, group, tokens.astype(np.float64))
    np.testing.assert_allclose(got, expected[returns.rollout.numpy()], atol=1e-9)


def test_every_outcome_advantage_has_an_oracle() -> None:
    assert set(ADVANTAGES.names) - {"gae"} == set(CASES)


# Groups of trials with turns, discounts and posted turn rewards, from records to advantages.


def trial(
    name: str,
    reward: float,
    turns: int,
    *,
    discount: float = 1.0,
    posted: dict[int, float] | None = None,
    shares: bool = True,
    tokens: int = 2,
) -> Rollout:
    """A trial of one chain of turns, each with one prompt token and `tokens` sampled tokens."""
    length = turns * (tokens + 1)
    at = np.arange(length)
    mask = at % (tokens + 1) > 0
    index = (at // (tokens + 1)).astype(np.int32)
    zeros = np.zeros(length, np.int32)
    segment = Segment(-1, zeros, mask, zeros.astype(np.float32), zeros, index)
    share = {t: discount ** (turns - 1 - t) for t in range(turns)}
    extra = posted or {}
    return Rollout(
        name,
        Task("t", {}),
        RolloutStatus.DONE,
        reward,
        segments=(segment,),
        turn_returns={t: share[t] * reward + extra.get(t, 0.0) for t in range(turns)},
        turn_shares=share if shares else {},
        num_turns=turns,
    )


def batch_of(*groups: list[Rollout]) -> Batch:
    return build_batch([Group(str(i), Task("t", {}), g) for i, g in enumerate(groups)])


def advantages_of(batch: Batch, name: str, **settings: Any) -> Array:
    part = {"name": name} | CASES.get(name, ({}, None))[0]
    config = AlgorithmConfig.model_validate({"advantage": part} | settings)
    Algorithm(config).compute_advantages(batch)
    assert batch.advantages is not None
    return batch.advantages.double().numpy()


@pytest.mark.parametrize("shares", [True, False], ids=["credited", "returns-only"])
@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_under_a_turn_discount_have_advantages_of_exactly_0(
    name: str, shares: bool
) -> None:
    group = [trial(str(i), 1.0, i + 1, discount=0.9, shares=shares) for i in range(4)]
    assert (advantages_of(batch_of(group), name) == 0).all()


@pytest.mark.parametrize("name", [*GROUPED, "reinforce++"])
def test_rewards_that_differ_by_rounding_give_advantages_of_0(name: str) -> None:
    rewards = [0.7, 0.1 + 0.6, 0.7000001, 0.2 + 0.5, 0.7, 0.7, 1.4 / 2]
    batch = batch_of([trial(str(i), r, 1) for i, r in enumerate(rewards)])
    shaping = {"reward": {"bias": -0.25, "scale": 3.0}}
    assert (advantages_of(batch, name) == 0).all()
    assert (advantages_of(batch, name, **shaping) == 0).all()
    algorithm = Algorithm(AlgorithmConfig(groups="with_signal"))
    assert not len(algorithm.trained_sequences(batch))


@pytest.mark.parametrize("name", GROUPED)
def test_group_of_one_has_advantages_of_exactly_0(name: str) -> None:
    alone = trial("a", 1.0, 3, discount=0.5, posted={0: 0.2, 1: 0.8})
    batch = batch_of([alone], [trial("b", 0.0, 1), trial("c", 1.0, 1)])
    got = advantages_of(batch, name)
    assert (got[:6] == 0).all()
    assert np.isfinite(got).all()


def test_posted_turn_rewards_are_compared_with_the_same_turns_of_the_group() -> None:
    group = [
        trial("a", 1.0, 2, posted={0: 0.2, 1: 0.8}),
        trial("b", 1.0, 2, posted={0: 0.8, 1: 0.2}),
    ]
    got = advantages_of(batch_of(group), "dr_grpo")
    np.testing.assert_allclose(got, [-0.3, -0.3, 0.3, 0.3, 0.3, 0.3, -0.3, -0.3], atol=1e-6)
    assert np.abs(advantages_of(batch_of(group), "grpo")).max() < 1.1


def test_first_turns_of_long_successes_are_reinforced_under_a_discount() -> None:
    group = [trial("long", 1.0, 6, discount=0.5), *(trial(str(i), 0.0, 1) for i in range(3))]
    got = advantages_of(batch_of(group), "dr_grpo")[:12:2]
    np.testing.assert_allclose(got, 0.75 * 0.5 ** np.arange(5, -1, -1), atol=1e-6)


def centred_by_hand(rollouts: list[list[tuple[float, float, float]]]) -> list[list[float]]:
    """The centred returns of each turn, given as `(reward, share, extra)`, for one group."""
    mean = np.mean([turns[0][0] for turns in rollouts])
    out = []
    for turns in rollouts:
        row = []
        for t, (reward, share, extra) in enumerate(turns):
            to_go = len(turns) - t
            same = [other[-to_go][2] for other in rollouts if len(other) >= to_go]
            row.append(float(share * (reward - mean) + extra - np.mean(same)))
        out.append(row)
    return out


@settings(max_examples=60, deadline=None)
@given(seed=seeds, discount=st.sampled_from([1.0, 0.9, 0.5]))
def test_discounts_and_turn_rewards_match_numpy_and_stay_bounded(
    seed: int, discount: float
) -> None:
    rng = np.random.default_rng(seed)
    groups, expected, largest = [], [], []
    for g in range(int(rng.integers(1, 4))):
        rewards = rng.choice([0.0, 0.5, 1.0], int(rng.integers(1, 6)))
        turns = rng.integers(1, 5, len(rewards))
        extras = [np.round(rng.normal(size=n), 2) * (rng.random(n) < 0.5) for n in turns]
        groups.append(
            [
                trial(f"{g}.{i}", r, n, discount=discount, posted=dict(enumerate(x.tolist())))
                for i, (r, n, x) in enumerate(zip(rewards, turns, extras, strict=True))
            ]
        )
        rows = centred_by_hand(
            [
                [(r, discount ** (n - 1 - t), x[t]) for t in range(n)]
                for r, n, x in zip(rewards, turns, extras, strict=True)
            ]
        )
        squares = [np.mean(np.square(row)) for row in rows]
        sigma = math.sqrt(sum(squares) / max(1, len(rows) - 1))
        for row in rows:
            scaled = np.array(row) / sigma if sigma > 1e-6 else np.zeros(len(row))
            expected.append((np.repeat(row, 2), np.repeat(scaled, 2)))
            largest.append(math.sqrt(max(1, len(rows) - 1) * len(row)))
    batch = batch_of(*groups)
    plain = np.concatenate([each for each, _ in expected])
    np.testing.assert_allclose(advantages_of(batch, "dr_grpo"), plain, atol=2e-6)
    scaled = advantages_of(batch, "grpo")
    np.testing.assert_allclose(scaled, np.concatenate([e for _, e in expected]), atol=1e-3)
    bounds = np.repeat(largest, [len(each) for each, _ in expected])
    assert (np.abs(scaled) <= bounds * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=40, deadline=None)
@given(seed=seeds, shift=st.sampled_from([-3.0, 0.5, 8.0]), turns=st.integers(1, 3))
def test_advantages_do_not_change_when_all_rewards_are_shifted(
    name: str, seed: int, shift: float, turns: int
) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.5, 1.0], (2, 4))

    def with_shift(by: float) -> Array:
        groups = [
            [trial(f"{g}.{i}", float(r + by), turns, discount=0.5) for i, r in enumerate(row)]
            for g, row in enumerate(rewards)
        ]
        return advantages_of(batch_of(*groups), name)

    np.testing.assert_allclose(with_shift(shift), with_shift(0.0), atol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "reinforce++", "reinforce++_baseline", "lite_ppo"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, unit=st.sampled_from([1e-6, 1e-3, 1e4]))
def test_normalised_advantages_do_not_depend_on_the_unit_of_the_rewards(
    name: str, seed: int, unit: float
) -> None:
    rewards = np.random.default_rng(seed).choice([0.0, 0.5, 1.0], 8)
    group, tokens = np.repeat([0, 1], 4), np.ones(8, np.int64)
    got, scaled = (
        part_of(name).estimate(returns_of(each, group, tokens)).advantages.numpy()
        for each in (rewards, rewards * unit)
    )
    np.testing.assert_allclose(scaled, got, atol=1e-9)
    assert np.abs(got).max() <= 7 / math.sqrt(8) + 1e-9


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_advantages_within_a_group_sum_to_0_over_rollouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, 3, 12))
    group = np.unique(group, return_inverse=True)[1]
    tokens = rng.integers(1, 6, 12)
    returns = returns_of(rng.normal(size=12), group, tokens)
    for name in ("grpo", "dr_grpo", "rloo"):
        got = part_of(name).estimate(returns).advantages
        sums = torch.zeros(12, dtype=torch.float64).index_add(0, returns.rollout, got)
        means = sums / returns.tokens
        per_group = torch.zeros(3, dtype=torch.float64).index_add(0, returns.group, means)
        np.testing.assert_allclose(per_group.numpy(), 0, atol=1e-9)


# The KL divergence in the reward.


def kl_batch(kl: list[list[float]], rewards: list[float]) -> Batch:
    """One rollout of one turn for each row, whose k1 to the reference is `kl` per token."""
    rollouts = [
        trial(str(i), r, 1, tokens=len(row))
        for i, (row, r) in enumerate(zip(kl, rewards, strict=True))
    ]
    batch = batch_of(rollouts)
    batch.prox_logprobs = torch.zeros(batch.num_tokens)
    batch.ref_logprobs = -torch.tensor([k for row in kl for k in row])
    return batch


KL = {"kl": {"coefficient": 0.1, "estimator": "k1", "where": "reward"}}


def test_kl_in_the_reward_is_credited_to_the_token_and_earlier_tokens() -> None:
    """A divergence at token 1 counts for tokens 0 and 1, and not for the later token 2."""
    batch = kl_batch([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]], [1.0, 1.0])
    got = advantages_of(batch, "dr_grpo", **KL)
    np.testing.assert_allclose(got, [-0.1, -0.1, 0.0, 0.1, 0.1, 0.0], atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_kl_in_the_reward_matches_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kl = [rng.normal(size=int(rng.integers(1, 5))).tolist() for _ in range(4)]
    rewards = rng.choice([0.0, 1.0], 4)
    to_go = [-0.1 * np.cumsum(row[::-1])[::-1] for row in kl]
    expected = []
    for row, reward in zip(to_go, rewards, strict=True):
        for t, value in enumerate(row):
            left = len(row) - t
            same = [other[-left] for other in to_go if len(other) >= left]
            expected.append(reward - rewards.mean() + value - np.mean(same))
    got = advantages_of(kl_batch(kl, rewards.tolist()), "dr_grpo", **KL)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_kl_in_the_reward_is_a_reward_of_each_token_under_gae() -> None:
    batch = kl_batch([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]], [1.0, 0.0])
    batch.values = torch.zeros(6)
    gae = {"name": "gae", "lam": 1.0, "normalise": "none"}
    config = AlgorithmConfig.model_validate({"advantage": gae, "critic": {}} | KL)
    Algorithm(config).compute_advantages(batch)
    assert batch.advantages is not None
    expected = torch.tensor([0.8, 0.8, 1.0, -0.1, 0.0, 0.0])
    torch.testing.assert_close(batch.advantages, expected)
    torch.testing.assert_close(batch.value_targets, expected)


# Generalised advantage estimation.


def gae_oracle(
    rewards: Array, values: Array, sequence: IntArray, gamma: float, lam: float
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
@given(seed=seeds, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_by_token_and_by_turn_matches_numpy(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 30))
    sequence = np.sort(rng.integers(0, 4, size))
    turns = np.sort(rng.integers(0, 4, size))
    rewards, values = rng.normal(size=(2, size))
    gae = Gae(gamma=gamma, lam=lam)
    columns = torch.as_tensor(rewards), torch.as_tensor(values), torch.as_tensor(sequence)
    got = gae.by_token(*columns)
    for mine, expected in zip(got, gae_oracle(rewards, values, sequence, gamma, lam), strict=True):
        np.testing.assert_allclose(mine.numpy(), expected, atol=1e-9)

    pairs = list(dict.fromkeys(zip(sequence.tolist(), turns.tolist(), strict=True)))
    own = [(sequence == s) & (turns == t) for s, t in pairs]
    turn_rewards = np.array([rewards[mask].sum() for mask in own])
    turn_values = np.array([values[mask][0] for mask in own])
    turn_sequence = np.array([s for s, _ in pairs])
    expected_turn = gae_oracle(turn_rewards, turn_values, turn_sequence, gamma, lam)
    got = gae.by_turn(*columns, torch.as_tensor(turns))
    for mine, expected in zip(got, expected_turn, strict=True):
        for mask, value in zip(own, expected, strict=True):
            np.testing.assert_allclose(mine.numpy()[mask], value, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, alpha=st.floats(0.01, 2), target=st.floats(0, 1))
def test_vapos_lambda_depends_on_the_length_and_the_critics_is_its_own(
    seed: int, alpha: float, target: float
) -> None:
    rng = np.random.default_rng(seed)
    sequence = np.sort(rng.integers(0, 4, int(rng.integers(1, 40))))
    rewards, values = rng.normal(size=(2, len(sequence)))
    columns = [torch.as_tensor(x) for x in (rewards, values, sequence)]
    got = Gae(length_alpha=alpha, target_lam=target).by_token(*columns)
    for s in np.unique(sequence):
        own = sequence == s
        lam = max(0.0, 1 - 1 / (alpha * own.sum()))
        advantages, _ = gae_oracle(rewards[own], values[own], sequence[own], 1.0, lam)
        _, targets = gae_oracle(rewards[own], values[own], sequence[own], 1.0, target)
        np.testing.assert_allclose(got[0].numpy()[own], advantages, atol=1e-9)
        np.testing.assert_allclose(got[1].numpy()[own], targets, atol=1e-9)


def test_whitening_gives_mean_0_and_variance_1_per_rollout() -> None:
    values = torch.tensor([3.0, 3.0, 3.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    torch.testing.assert_close(
        whiten(values, weights), torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    )


def test_whitening_of_values_that_differ_by_rounding_gives_0() -> None:
    values = torch.tensor([0.7, 0.7 + 1e-9, 0.7], dtype=torch.float64)
    assert (whiten(values, torch.full((3,), 1 / 3, dtype=torch.float64)) == 0).all()


def test_pass_at_k_uses_the_size_of_a_group_smaller_than_k() -> None:
    returns = returns_of(np.array([1.0, 0.0]), [0, 0], [1, 1])
    assert torch.isfinite(PassAtK(k=8).estimate(returns).advantages).all()


def test_whole_batch_is_one_group() -> None:
    returns = returns_of(np.array([1.0, 0.0, 0.5]), [0, 1, 1], [1, 1, 1])
    got = returns.centred(group_mean, returns.whole_batch)
    np.testing.assert_allclose(got.numpy(), [0.5, -0.5, 0.0])
