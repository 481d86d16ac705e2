"""Shapes the rewards of rollouts before advantages are computed: bias, scale, bounds, and a penalty
for length."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from trainer.algorithms.part import Part


class Overlong(Part):
    """`min(0, −(len − (Lmax − k)) / k · f)`: soft overlong punishment, DAPO, arXiv 2503.14476,
    equation 13; past Lmax it keeps falling. `len` counts the trained tokens of a rollout.
    """

    max_tokens: int = Field(ge=1)
    """Lmax, the number of trained tokens of a rollout at which the penalty reaches `factor`."""
    buffer_tokens: int = Field(ge=1)
    """k, the number of tokens below `max_tokens` at which the penalty starts."""
    factor: float = Field(1.0, ge=0)
    """f, the penalty at `max_tokens`."""

    def penalty(self, tokens: Tensor) -> Tensor:
        """`[R]`, from the number of trained tokens of each rollout `[R]`."""
        over = tokens - (self.max_tokens - self.buffer_tokens)
        return (-over / self.buffer_tokens * self.factor).clamp(max=0.0)


class RewardShaping(Part):
    """`clip((R + bias) · scale, low, high)` plus the overlong penalty."""

    bias: float = 0.0
    """Constant that is added to the reward first."""
    scale: float = 1.0
    """Factor by which the sum of reward and bias is multiplied."""
    low: float | None = None
    """Smallest reward before the overlong penalty; none: no bound."""
    high: float | None = None
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
        result = (rewards + self.bias) * self.scale
        if self.low is None and self.high is None:
            return result
        return result.clamp(self.low, self.high)
