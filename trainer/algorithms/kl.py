"""Divergence of the policy from another model, from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before an exponential, so that no float32 overflows (verl's)."""


def divergence(logprobs: Tensor, other: Tensor, estimator: Estimator) -> Tensor:
    """An estimate of KL(π ‖ other) per token, with `k1 = log π − log other`.

    k1 itself (unbiased, signed); `k2 = ½ k1²` (whose gradient is that of the reverse KL);
    `k3 = e^{−k1} − 1 + k1` (unbiased, never negative); `abs = |k1|`.
    Schulman, Approximating KL divergence, joschu.net/blog/kl-approx.html.
    """
    k1 = logprobs - other
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "abs":
        return k1.abs()
    k1 = k1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.exp(-k1) - 1 + k1


def adapted(coefficient: float, kl: float, *, target: float, horizon: float) -> float:
    """The next coefficient: up when `kl` is above `target`, down when below, by a fifth at most.

    `β · (1 + clip(kl / target − 1, −0.2, 0.2) / horizon)`, horizon in updates: Ziegler et al.,
    arXiv 1909.08593, section 2.2.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return coefficient * (1 + error / horizon)
