"""Rewards → advantages.

Invariant: every baseline and every scale counts rollouts, never tokens, turns or sequences, so an
agent that forks weighs no more than one that does not. A group of one, and one whose rewards are
all the same, give finite advantages: 0 wherever the baseline is the group's own.

Outcome estimators return `Baseline(mean, scale)` per rollout: a token that its turn credits with
`G` has the advantage `(G − mean) · scale`; without turn rewards `G` is the rollout's reward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Baseline(NamedTuple):
    """What is taken from each rollout's returns, and what they are multiplied by.

    Example: a group with rewards [1 0 0 1] under GRPO without ε:
        Baseline(mean=[.5 .5 .5 .5], scale=[1.73 1.73 1.73 1.73])
    """

    mean: Tensor
    """`[R]`"""
    scale: Tensor
    """`[R]`"""


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """`[R]`: for each rollout the sum of `values` `[R]` over its group."""
    sums = values.new_zeros(int(group.max()) + 1 if len(group) else 0)
    return sums.index_add(0, group, values)[group]


def group_size(rewards: Tensor, group: Tensor) -> Tensor:
    return group_sum(torch.ones_like(rewards), group)


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    return group_sum(rewards, group) / group_size(rewards, group)


def group_std(rewards: Tensor, group: Tensor) -> Tensor:
    """The unbiased standard deviation (n − 1, as in TRL and verl); 0 in a group of one."""
    squares = group_sum((rewards - group_mean(rewards, group)).square(), group)
    return (squares / (group_size(rewards, group) - 1).clamp(min=1)).sqrt()


def batch_std(values: Tensor) -> Tensor:
    """The unbiased standard deviation over the batch's rollouts; 0 for one rollout."""
    return ((values - values.mean()).square().sum() / max(1, len(values) - 1)).sqrt()


def grpo(rewards: Tensor, group: Tensor, *, eps: float) -> Baseline:
    """`(R − μ_g) / (σ_g + ε)`. DeepSeekMath, arXiv 2402.03300."""
    return Baseline(group_mean(rewards, group), 1 / (group_std(rewards, group) + eps))


def dr_grpo(rewards: Tensor, group: Tensor) -> Baseline:
    """`R − μ_g`. Understanding R1-Zero-like training, arXiv 2503.20783."""
    return Baseline(group_mean(rewards, group), torch.ones_like(rewards))


def rloo(rewards: Tensor, group: Tensor) -> Baseline:
    """`R_i − mean_{j≠i} R_j`, which is `(R_i − μ_g) · n / (n − 1)`. arXiv 2402.14740.

    A group of one has no others to compare with: advantage 0.
    """
    size, total = group_size(rewards, group), group_sum(rewards, group)
    others = (total - rewards) / (size - 1).clamp(min=1)
    return Baseline(torch.where(size > 1, others, rewards), torch.ones_like(rewards))


def reinforce_pp(rewards: Tensor, *, eps: float) -> Baseline:
    """`(R − μ) / (σ + ε)` over the whole batch. REINFORCE++, arXiv 2501.03262."""
    scale = 1 / (batch_std(rewards) + eps)
    return Baseline(rewards.mean().expand_as(rewards), scale.expand_as(rewards))


def reinforce_pp_baseline(rewards: Tensor, group: Tensor, *, eps: float) -> Baseline:
    """`(R − μ_g) / (σ(R − μ_g) + ε)`, σ over the batch. REINFORCE++-baseline, arXiv 2501.03262."""
    mean = group_mean(rewards, group)
    scale = 1 / (batch_std(rewards - mean) + eps)
    return Baseline(mean, scale.expand_as(rewards))


def lite_ppo(rewards: Tensor, group: Tensor, *, eps: float) -> Baseline:
    """`(R − μ_g) / (σ_batch + ε)`. Tricks or traps (Lite PPO), arXiv 2508.08221."""
    scale = 1 / (batch_std(rewards) + eps)
    return Baseline(group_mean(rewards, group), scale.expand_as(rewards))


def opo(rewards: Tensor, group: Tensor, tokens: Tensor) -> Baseline:
    """`R − Σ R·len / Σ len` over the group, `len` in trained tokens. arXiv 2505.23585."""
    mean = group_sum(rewards * tokens, group) / group_sum(tokens, group)
    return Baseline(mean, torch.ones_like(rewards))


def gpg(rewards: Tensor, group: Tensor) -> Baseline:
    """`α (R − μ_g)`, α the batch over its rollouts in groups with differing rewards.

    Group policy gradient, arXiv 2504.02546: α makes up for the samples without a gradient.
    """
    mean = group_mean(rewards, group)
    useful = (group_std(rewards, group) > 0).sum().clamp(min=1)
    return Baseline(mean, (len(rewards) / useful).expand_as(rewards))


def pass_at_k(rewards: Tensor, group: Tensor, *, k: int, threshold: float) -> Tensor:
    """Advantages `[R]` that maximise pass@k of a group of N with c correct. arXiv 2508.10751.

    `ρ = 1 − C(N−c, k) / C(N, k)`, `σ = √(ρ (1 − ρ))`, for a correct rollout `(1 − ρ) / σ`, else
    `(1 − ρ − C(N−c−1, k−1) / C(N−1, k−1)) / σ`; 0 where σ is. A rollout is correct when its
    reward is at least `threshold`. With fewer than `k` rollouts, `k` is their number.
    """
    size = group_size(rewards, group)
    correct = (rewards >= threshold).to(rewards.dtype)
    wrong = size - group_sum(correct, group)
    draws = size.clamp(max=k)
    none_correct = _choose_ratio(wrong, size, draws)
    sigma = ((1 - none_correct) * none_correct).sqrt()
    others_wrong = _choose_ratio(wrong - 1, size - 1, draws - 1)
    raw = torch.where(correct > 0, none_correct, none_correct - others_wrong)
    return torch.where(sigma > 0, raw / sigma.clamp(min=1e-12), torch.zeros_like(raw))


def _choose_ratio(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
    """`C(a, k) / C(b, k)` for `a <= b`, `k <= b`: 0 where `a < k`."""

    def log_choose(n: Tensor) -> Tensor:
        n, drawn = n.double(), k.double()
        return torch.lgamma(n + 1) - torch.lgamma(drawn + 1) - torch.lgamma(n - drawn + 1)

    possible = a >= k
    ratio = torch.exp(log_choose(torch.where(possible, a, k)) - log_choose(b))
    return torch.where(possible, ratio, torch.zeros_like(ratio)).to(a.dtype)


def accepted(rewards: Tensor, *, threshold: float) -> Tensor:
    """1 for a rollout whose reward is at least `threshold`, else 0: rejection-sampled SFT."""
    return (rewards >= threshold).to(rewards.dtype)


def gae(
    rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`(advantages, value targets)` `[N]`: `A_t = δ_t + γλ A_{t+1}`, `δ_t = r_t + γ V_{t+1} − V_t`.

    Generalized advantage estimation, arXiv 1506.02438, over the trained tokens of each sequence;
    what lies between two of them (a tool's output) is passed over. `rewards`, `values` `[N]`;
    `sequence` `[N]` ascending. The target is `A_t + V_t`.
    """
    if not len(values):
        return values, values
    index, counts = torch.unique_consecutive(sequence, return_inverse=True, return_counts=True)[1:]
    column = torch.arange(len(values)) - (counts.cumsum(0) - counts)[index]
    value_S_L, reward_S_L = (values.new_zeros(len(counts), int(counts.max()) + 1) for _ in range(2))
    value_S_L[index, column], reward_S_L[index, column] = values, rewards
    advantage_S_L = torch.zeros_like(value_S_L)
    for t in range(value_S_L.shape[1] - 2, -1, -1):
        delta = reward_S_L[:, t] + gamma * value_S_L[:, t + 1] - value_S_L[:, t]
        advantage_S_L[:, t] = delta + gamma * lam * advantage_S_L[:, t + 1]
    advantages = advantage_S_L[index, column]
    return advantages, advantages + values


def gae_by_turn(
    rewards: Tensor, values: Tensor, sequence: Tensor, turns: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """As `gae`, with a whole turn as one action, whose value is that of its first token.

    Every token of the turn has the turn's advantage and target; its reward is their sum.
    """
    pair = torch.stack([sequence, turns])
    _, index, counts = torch.unique_consecutive(
        pair, dim=1, return_inverse=True, return_counts=True
    )
    first = counts.cumsum(0) - counts
    turn_rewards = rewards.new_zeros(len(counts)).index_add(0, index, rewards)
    advantages, targets = gae(turn_rewards, values[first], sequence[first], gamma=gamma, lam=lam)
    return advantages[index], targets[index]


def whiten(advantages: Tensor, weights: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Mean 0 and variance 1 under `weights` `[N]` that sum to 1 (one share per rollout)."""
    mean = (advantages * weights).sum()
    variance = ((advantages - mean).square() * weights).sum()
    return (advantages - mean) * torch.rsqrt(variance + eps)
