"""The critic's loss per token, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from trainer.algorithms.policy_losses import PolicyLoss


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    *,
    clip: float | None,
    huber_delta: float | None = None,
) -> PolicyLoss:
    """`max(L(V), L(clip(V, V_old ± ε)))`, `L = ½ (V − G)²` or Huber's with `huber_delta`. `[M]`.

    PPO's value clipping as in OpenAI's baselines; Huber as in MAPPO, arXiv 2103.01955.
    """
    plain = _error(values, targets, huber_delta)
    if clip is None:
        return PolicyLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = _error(near, targets, huber_delta)
    return PolicyLoss(torch.maximum(plain, bounded), bounded > plain)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """`1 − Var(G − V) / Var(G)`: 1 is perfect, 0 no better than a constant; 0 if G is constant."""
    variance = targets.var(correction=0)
    return float(1 - (targets - values).var(correction=0) / variance) if variance > 0 else 0.0


def _error(values: Tensor, targets: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (values - targets).square()
    return huber_loss(values, targets, reduction="none", delta=huber_delta)
