"""What is done to rewards before advantages: scale, bias, clip, length penalty, group filter."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.advantages import group_std


def affine_clip(
    rewards: Tensor, *, bias: float, scale: float, low: float | None, high: float | None
) -> Tensor:
    """`clip((R + bias) · scale, low, high)`; a bound of None does not bind."""
    shaped = (rewards + bias) * scale
    return shaped if low is None and high is None else shaped.clamp(low, high)


def overlong_penalty(
    tokens: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float
) -> Tensor:
    """`min(0, −(len − (Lmax − k)) / k · f)`: DAPO's soft punishment, arXiv 2503.14476, eq. 13.

    `tokens` `[R]`, `max_tokens` = Lmax, `buffer_tokens` = k. Past Lmax it keeps falling.
    """
    over = tokens - (max_tokens - buffer_tokens)
    return (-over / buffer_tokens * factor).clamp(max=0.0)


def has_signal(rewards: Tensor, group: Tensor) -> Tensor:
    """`[R]` bool: whether the rewards of the rollout's group differ (DAPO's dynamic sampling)."""
    return group_std(rewards, group) > 0


def kl_in_reward(kl: Tensor, rollout: Tensor, *, coefficient: float, rollouts: int) -> Tensor:
    """`[R]`: `−β Σ_t kl_t` over each rollout's tokens; `kl`, `rollout` `[N]`."""
    return -coefficient * kl.new_zeros(rollouts).index_add(0, rollout, kl)


def turn_rewards(returns: Tensor, sequence: Tensor, turns: Tensor) -> Tensor:
    """`[N]` rewards whose sums from any turn to the end of its sequence are the turns' returns.

    They fall on the last trained token of each turn; where every turn is credited with the
    outcome, that is the outcome on the last token of each sequence. All `[N]`.
    """
    rewards = torch.zeros_like(returns)
    same_sequence = sequence[1:] == sequence[:-1]
    ends_turn = torch.ones_like(sequence, dtype=torch.bool)
    ends_turn[:-1] = ~same_sequence | (turns[1:] != turns[:-1])
    after = torch.zeros_like(returns)
    after[:-1] = torch.where(same_sequence, returns[1:], torch.zeros_like(returns[1:]))
    rewards[ends_turn] = (returns - after)[ends_turn]
    return rewards
