"""Policy losses per token, from log-probabilities under π_θ and π_prox: one class per loss.

`logprobs` are the log-probabilities under π_θ (with gradient), and `prox` those under π_prox, the
policy at the start of the update; both are `[M]`. The ratio is `r = π_θ / π_prox`. `advantages`
`[M]` are constants. The losses are then multiplied by the correction for the behaviour policy
(`correction.py`) and summed with weights (`aggregation.py`).

Losses with a ratio per sequence need all trained tokens of a sequence, which packing never
separates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.kl import LOG_RATIO_BOUND
from trainer.algorithms.part import MAX_BOUND, FunctionPart, NamedPart, Parts, column_of

ClipLow = Annotated[float, Field(ge=0, le=1)]
ClipHigh = Annotated[float, Field(ge=0, le=MAX_BOUND)]


class PolicyLoss(NamedTuple):
    """Example: PolicyLoss(losses=[-.3 .8], clipped=[False True])"""

    losses: Tensor
    """`[M]`, loss of each token."""
    clipped: Tensor
    """`[M]` bool: whether the trust region removed the token's gradient (or bounded its weight)."""


class Loss(NamedPart, ABC):
    """The policy's loss, before any correction. A subclass declares its settings as fields."""

    @abstractmethod
    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        """The loss of each token. All arguments are `[M]`; `sequence` is the index of the token's
        sequence."""


class Clipping(Loss):
    """A loss whose ratio is bounded."""

    clip_low: ClipLow = 0.2
    """ε_lo, how far the ratio (with `gspo`, the sequence's) may fall below 1; 1 sets no bound, as
    in the paper of `cispo`."""
    clip_high: ClipHigh = 0.2
    """ε_hi, how far the ratio may rise above 1."""


class Ppo(Clipping):
    """`−min(r A, clip(r, 1 − ε_lo, 1 + ε_hi) A)`; with dual clip, for A < 0 at most `c |A|`.

    PPO, arXiv 1707.06347; clip-higher, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729.
    """

    name: Literal["ppo"] = "ppo"
    dual_clip: float | None = Field(None, gt=1, le=MAX_BOUND)
    """c: for a negative advantage, the loss is at most `c |A|`; 3 in the paper. None: no bound."""

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        loss = clipped_loss(ratio(logprobs, prox), advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return loss
        ceiling = -self.dual_clip * advantages
        beyond = (advantages < 0) & (loss.losses > ceiling)
        return PolicyLoss(torch.where(beyond, ceiling, loss.losses), loss.clipped | beyond)


class Gspo(Clipping):
    """PPO's loss with one ratio per sequence, `r = exp(mean_t log r_t)`. GSPO, arXiv 2507.18071.

    The gradient of each token is that of its own log-probability, scaled by the sequence's ratio:
    the paper's form GSPO-token, which has the same value and, if all tokens of a sequence have the
    same advantage, the same gradient.
    """

    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        mean = sequence_mean((logprobs - prox).detach(), sequence)
        log_ratio = logprobs - logprobs.detach() + mean
        r = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        return clipped_loss(r, advantages, self.clip_low, self.clip_high)


class Cispo(Clipping):
    """`−sg(clip(r, 1 − ε_lo, 1 + ε_hi)) A log π_θ`. MiniMax-M1 (CISPO), arXiv 2506.13585."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        r = ratio(logprobs.detach(), prox)
        bounded = r.clamp(1 - self.clip_low, 1 + self.clip_high)
        return PolicyLoss(-bounded * advantages * logprobs, r != bounded)


class Sapo(Loss):
    """`−(4 / τ) σ(τ (r − 1)) A`, τ by the sign of A. SAPO, arXiv 2511.20347."""

    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, ge=1e-3, le=1e3)
    """τ for a positive advantage."""
    tau_negative: float = Field(1.05, ge=1e-3, le=1e3)
    """τ for a negative advantage."""

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        tau = torch.full_like(advantages, self.tau_negative)
        tau = tau.masked_fill(advantages > 0, self.tau_positive)
        gate = torch.sigmoid(tau * (ratio(logprobs, prox) - 1)) * (4 / tau)
        return PolicyLoss(-gate * advantages, torch.zeros_like(advantages, dtype=torch.bool))


class Reinforce(Loss):
    """`−A log π_θ`. Williams 1992; GPG (arXiv 2504.02546) is this with its own advantage."""

    name: Literal["reinforce"] = "reinforce"

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        return PolicyLoss(-advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool))


class FunctionLoss(Loss, FunctionPart):
    """A function of your own, which returns the loss of each token, `[M]`, with its gradient."""

    def __call__(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> Tensor:
        losses = self.called(logprobs, prox, advantages, sequence)
        return column_of(self.name, "loss", losses, logprobs)

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        losses = self(logprobs, prox, advantages, sequence)
        return PolicyLoss(losses, torch.zeros_like(losses, dtype=torch.bool))


LOSSES = Parts[Loss](Loss, (Ppo, Gspo, Cispo, Sapo, Reinforce), FunctionLoss)
"""Registry of the losses for `algorithm.loss`."""


def ratio(logprobs: Tensor, prox: Tensor) -> Tensor:
    """`π_θ / π_prox`, with its logarithm clamped to ±20."""
    return torch.exp((logprobs - prox).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def clipped_loss(r: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """`−min(r A, clip(r, 1 − ε_lo, 1 + ε_hi) A)` of ratios `[M]`."""
    plain = -r * advantages
    bounded = -r.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(torch.maximum(plain, bounded), bounded > plain)


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """`[M]`: for each token the mean of `values` over its sequence."""
    _, index, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, index, values)
    mean: Tensor = sums / counts
    return mean[index]


def log_linear_prox(
    logprobs: Tensor, behaviour: Tensor, versions: Tensor, *, version: int
) -> Tensor:
    """`log π_b + α (log π_θ − log π_b)`: π_prox without a forward pass of its own (AReaL).

    `α = (v_prox − v_b) / (v_θ − v_b)`, where `v_prox = version` is the version of the weights at
    the start of the update, and `v_θ = version + 1` the version after it. α is 0 for a token that
    was sampled by the current weights, and approaches 1 for older tokens. The result has no
    gradient.
    """
    alpha = (version - versions).clamp(min=0) / (version + 1 - versions).clamp(min=1)
    return behaviour + alpha * (logprobs.detach() - behaviour)
