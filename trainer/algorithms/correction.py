"""Correction for the behaviour policy: what the engine sampled from is never exactly what trains.

`log_w = log π_prox − log π_b` per token `[M]`, over engine noise, quantisation and staleness alike.
Weights multiply the loss; rejections set them to 0. None of it has a gradient, and the loss's
denominator stays what it was. Sequence-level quantities need whole sequences, which packing keeps.

Truncated importance sampling: fengyao.notion.site/off-policy-rl. Masked, geometric and
sequence-level: richardli.xyz/rl-collapse. IcePop: ringtech.notion.site/icepop.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.kl import LOG_RATIO_BOUND, Estimator, divergence
from trainer.algorithms.policy_losses import sequence_mean

Level = Literal["token", "sequence", "geometric"]
Scope = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


def importance(log_w: Tensor, sequence: Tensor, level: Level) -> Tensor:
    """`w` `[M]`: per token, the product over its sequence, or that product's geometric mean."""
    if level == "sequence":
        log_w = _over_sequence(log_w, sequence, "sum")
    elif level == "geometric":
        log_w = sequence_mean(log_w, sequence)
    return torch.exp(log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def truncated(w: Tensor, *, upper: float) -> Tensor:
    """`min(w, c)` (TIS)."""
    return w.clamp(max=upper)


def masked(w: Tensor, *, lower: float, upper: float) -> Tensor:
    """`w` within `[lower, upper]`, else 0: MIS with lower 0, IcePop with `[α, β]` per token."""
    return torch.where((w >= lower) & (w <= upper), w, torch.zeros_like(w))


def veto(log_w: Tensor, sequence: Tensor, *, min_ratio: float) -> Tensor:
    """`[M]` bool, False for all of a sequence in which any token's `w` is below `min_ratio`."""
    lowest = -_over_sequence(-log_w, sequence, "amax")
    return lowest >= torch.log(torch.tensor(min_ratio))


def within(
    log_w: Tensor,
    sequence: Tensor,
    *,
    estimator: Estimator,
    scope: Scope,
    lower: float | None,
    upper: float,
) -> Tensor:
    """`[M]` bool: the divergence of π_b from π_prox is at most `upper` (and at least `lower`).

    The estimators of `kl.divergence` for KL(π_b ‖ π_prox), whose k1 is `−log_w`, of the token
    itself or summed, averaged or maximal over its sequence.
    """
    zero = torch.zeros_like(log_w)
    estimate = divergence(-log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), zero, estimator)
    if scope == "sequence_mean":
        estimate = sequence_mean(estimate, sequence)
    elif scope == "sequence_sum":
        estimate = _over_sequence(estimate, sequence, "sum")
    elif scope == "sequence_max":
        estimate = _over_sequence(estimate, sequence, "amax")
    keep = estimate <= upper
    return keep if lower is None else keep & (estimate >= lower)


def _over_sequence(values: Tensor, sequence: Tensor, reduce: Literal["sum", "amax"]) -> Tensor:
    _, index = torch.unique(sequence, return_inverse=True)
    size = int(index.max()) + 1 if len(index) else 0
    out = values.new_zeros(size)
    return out.scatter_reduce(0, index, values, reduce, include_self=False)[index]
