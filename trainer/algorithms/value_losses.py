"""The critic's settings, its loss per token, and its explained variance."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import huber_loss

from trainer.algorithms.part import MAX_BOUND, Part
from trainer.algorithms.policy_losses import PolicyLoss
from trainer.optimizer_config import MAX_RATE, MIN_LR, OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """Section `algorithm.critic.optimizer`: the keys of section `optimizer`."""

    lr: float = Field(1e-5, ge=MIN_LR, le=MAX_RATE)


class CriticConfig(Part):
    """A critic with the loss `max(L(V), L(clip(V, V_old ± ε)))`; L is `½ (V − G)²` or Huber's loss.

    Value clipping as in OpenAI's baselines of PPO; Huber as in MAPPO, arXiv 2103.01955.
    """

    path: Path | None = None
    """Folder of the checkpoint whose backbone the critic starts from; none: the policy's."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The critic's own optimizer."""
    clip: float | None = Field(0.5, gt=0, le=MAX_BOUND)
    """ε, how far a value may move from its value at the start of the update; none: no bound."""
    huber_delta: float | None = Field(None, gt=0, le=MAX_BOUND)
    """Error above which Huber's loss is linear; none: squared error."""
    warmup_steps: int = Field(0, ge=0)
    """Number of initial steps in which only the critic is trained."""

    def losses(self, values: Tensor, old_values: Tensor, targets: Tensor) -> PolicyLoss:
        """The loss of each token. All arguments are `[M]`."""
        plain = self._error(values, targets)
        if self.clip is None:
            return PolicyLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
        near = old_values + (values - old_values).clamp(-self.clip, self.clip)
        bounded = self._error(near, targets)
        return PolicyLoss(torch.maximum(plain, bounded), bounded > plain)

    def _error(self, values: Tensor, targets: Tensor) -> Tensor:
        if self.huber_delta is None:
            return 0.5 * (values - targets).square()
        return huber_loss(values, targets, reduction="none", delta=self.huber_delta)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """`1 − Var(G − V) / Var(G)`: 1 for perfect values, 0 for values that are no better than a
    constant; 0 if G is constant."""
    variance = targets.var(correction=0)
    return float(1 - (targets - values).var(correction=0) / variance) if variance > 0 else 0.0
