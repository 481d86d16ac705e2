"""Policy losses per token, from log-probabilities under three policies.

`logprobs` is π_θ's (with gradient), `prox` π_prox's at the start of the update, both `[M]`; the
ratio is `r = π_θ / π_prox`. `advantages` `[M]` are constants. Corrections for the behaviour policy
multiply what these functions return (`correction.py`), weights sum it (`aggregation.py`).

Sequence-level losses need all of a sequence's trained tokens, which packing never separates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.kl import LOG_RATIO_BOUND


class PolicyLoss(NamedTuple):
    losses: Tensor
    """`[M]`"""
    clipped: Tensor
    """`[M]` bool: the trust region took the token's gradient (or bounded its weight)."""


def ratio(logprobs: Tensor, prox: Tensor) -> Tensor:
    """`π_θ / π_prox`, its logarithm clamped to ±20."""
    return torch.exp((logprobs - prox).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def ppo(
    logprobs: Tensor,
    prox: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`−min(r A, clip(r, 1 − ε_lo, 1 + ε_hi) A)`; with dual clip, for A < 0 at most `c |A|`.

    PPO, arXiv 1707.06347; clip-higher, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729.
    """
    return _clipped(ratio(logprobs, prox), advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    prox: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's loss with one ratio per sequence, `r = exp(mean_t log r_t)`. GSPO, arXiv 2507.18071.

    The gradient reaches each token through its own log-probability, scaled by the sequence's
    ratio (the paper's GSPO-token form, equal in value and, for one advantage a sequence, in
    gradient).
    """
    mean = sequence_mean((logprobs - prox).detach(), sequence)
    log_ratio = logprobs - logprobs.detach() + mean
    r = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return _clipped(r, advantages, clip_low, clip_high, None)


def cispo(
    logprobs: Tensor, prox: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """`−sg(clip(r, 1 − ε_lo, 1 + ε_hi)) A log π_θ`. MiniMax-M1 (CISPO), arXiv 2506.13585."""
    r = ratio(logprobs.detach(), prox)
    bounded = r.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-bounded * advantages * logprobs, r != bounded)


def sapo(
    logprobs: Tensor, prox: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float
) -> PolicyLoss:
    """`−(4 / τ) σ(τ (r − 1)) A`, τ by the sign of A. SAPO, arXiv 2511.20347."""
    positive = advantages > 0
    tau = torch.full_like(advantages, tau_negative).masked_fill(positive, tau_positive)
    gate = torch.sigmoid(tau * (ratio(logprobs, prox) - 1)) * (4 / tau)
    return PolicyLoss(-gate * advantages, torch.zeros_like(advantages, dtype=torch.bool))


def reinforce(logprobs: Tensor, advantages: Tensor) -> PolicyLoss:
    """`−A log π_θ`. Williams 1992; GPG (arXiv 2504.02546) is this with its own advantage."""
    return PolicyLoss(-advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool))


def m2_mask(behaviour: Tensor, prox: Tensor, *, threshold: float) -> Tensor:
    """`[N]` bool: the tokens that stay when the largest `(log π_b − log π_prox)²` are dropped
    until the mean of the others is below `threshold`. M2PO, arXiv 2510.01161.
    """
    squares = (behaviour - prox).square()
    ordered, order = squares.sort()
    means = ordered.cumsum(0) / torch.arange(1, len(squares) + 1)
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order] = means < threshold
    return keep


def log_linear_prox(
    logprobs: Tensor, behaviour: Tensor, versions: Tensor, *, version: int
) -> Tensor:
    """`log π_b + α (log π_θ − log π_b)`: π_prox without a forward pass of its own (AReaL).

    `α = (v_prox − v_b) / (v_θ − v_b)` with `v_prox = version`, the weights at the start of the
    update, and `v_θ = version + 1`, those that it makes: 0 for a token that was sampled with the
    current weights, nearer 1 the staler it is. Has no gradient.
    """
    alpha = (version - versions).clamp(min=0) / (version + 1 - versions).clamp(min=1)
    return behaviour + alpha * (logprobs.detach() - behaviour)


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """`[M]`: for each token the mean of `values` over its sequence."""
    _, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, index, values)
    mean: Tensor = sums / counts
    return mean[index]


def _clipped(
    r: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> PolicyLoss:
    plain = -r * advantages
    bounded = -r.clamp(1 - low, 1 + high) * advantages
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (losses > ceiling)
        losses, clipped = torch.where(beyond, ceiling, losses), clipped | beyond
    return PolicyLoss(losses, clipped)
