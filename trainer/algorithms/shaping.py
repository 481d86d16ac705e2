"""Shapes the rewards of rollouts and of their turns before advantages are computed: bias, scale,
bounds, and a penalty for length."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agent_loop.reward_values import REWARD_LIMIT
from trainer.algorithms.part import MAX_BOUND, MAX_COUNT, MAX_FACTOR, Part


class Overlong(Part):
    """`min(0, −(len − (Lmax − k)) / k · f)`: soft overlong punishment, DAPO, arXiv 2503.14476,
    equation 13; past Lmax it keeps falling. `len` counts the trained tokens of a rollout.
    """

    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    """Lmax, the number of trained tokens of a rollout at which the penalty reaches `factor`."""
    buffer_tokens: int = Field(ge=1, le=MAX_COUNT)
    """k, the number of tokens below `max_tokens` at which the penalty starts."""
    factor: float = Field(1.0, ge=0, le=MAX_FACTOR)
    """f, the penalty at `max_tokens`."""

    def penalty(self, tokens: Tensor) -> Tensor:
        """`[R]`, from the number of trained tokens of each rollout `[R]`."""
        over = tokens - (self.max_tokens - self.buffer_tokens)
        return (-over / self.buffer_tokens * self.factor).clamp(max=0.0)


class RewardShaping(Part):
    """`clip((R + bias) · scale, low, high)` plus the overlong penalty.

    Each reward of a turn or branch is shaped alike, but for the bias and the penalty, which are of
    the trial: turns without a reward would have to get them, too."""

    bias: float = Field(0.0, ge=-REWARD_LIMIT, le=REWARD_LIMIT)
    """Constant that is added to the reward of a trial first."""
    scale: float = Field(1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Factor by which the sum of reward and bias is multiplied."""
    low: float | None = Field(None, ge=-MAX_BOUND, le=MAX_BOUND)
    """Smallest reward before the overlong penalty; none: no bound."""
    high: float | None = Field(None, ge=-MAX_BOUND, le=MAX_BOUND)
    """Largest reward; none: no bound."""
    overlong: Overlong | None = None
    """Penalty for long rollouts; none: no penalty."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}); exchange them")
        return self

    def shaped(self, rewards: Tensor) -> Tensor:
        """`[R]`: the shaped rewards, without the overlong penalty."""
        return self._bounded((rewards + self.bias) * self.scale)

    def shaped_turns(self, rewards: Tensor) -> Tensor:
        """`[N]`: the shaped rewards of turns; 0 remains 0, which is also *no reward*."""
        return torch.where(rewards == 0, rewards, self._bounded(rewards * self.scale))

    def _bounded(self, rewards: Tensor) -> Tensor:
        if self.low is None and self.high is None:
            return rewards
        return rewards.clamp(self.low, self.high)
