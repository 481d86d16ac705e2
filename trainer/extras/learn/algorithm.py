"""The advantage and the loss of learning from evidence.

`logprobs` `[M]` are those of π_θ, and `prox` those of μ, which sampled (`algorithm.prox:
behaviour`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.advantages import Advantage, Estimate
from trainer.algorithms.correction import over_sequence
from trainer.algorithms.policy_losses import Loss, PolicyLoss
from trainer.algorithms.returns import Returns


class AsGiven(Advantage):
    """The return itself: evidence has a sign of its own, and no group to be compared with."""

    compares_within_group = False

    def estimate(self, returns: Returns) -> Estimate:
        reached = returns.share * returns.trial_rewards[returns.rollout]
        return Estimate(reached + returns.extra)


class Topr(Loss):
    """`−w A log π_θ`, where `w = 1` for `A > 0`, and `w = sg(clip(π_θ/μ, 0, 1))`, of the token's
    whole sequence, for `A < 0`. Tapered off-policy REINFORCE, arXiv 2503.14286, with its a⁺ = b⁺ =
    1, a⁻ = 0 and b⁻ = 1.

    Answers with good evidence are imitated, however improbable they have become; those with bad
    evidence are pushed down only as far as the policy still gives them, so that the loss has a
    minimum.
    """

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        log_ratio = over_sequence((logprobs - prox).detach(), sequence, "sum")
        tapered = torch.exp(log_ratio.clamp(max=0.0))
        weights = torch.where(advantages > 0, torch.ones_like(tapered), tapered)
        clipped = (advantages < 0) & (log_ratio > 0)
        return PolicyLoss(-weights * advantages * logprobs, clipped)
