"""Corrects the difference between the behaviour policy and the policy that is trained.

`log_w = log π_prox − log π_b` per token `[M]` covers engine noise, quantisation and staleness.
Weights multiply the policy's loss. A rejected token is trained by no term of the loss (policy,
entropy, KL, distillation). Neither has a gradient, and neither changes the denominator of the loss.
Quantities of a sequence need all of its tokens, which packing never separates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.kl import LOG_RATIO_BOUND, Estimated
from trainer.algorithms.part import MAX_BOUND, NamedPart, Part, Parts
from trainer.algorithms.policy_losses import sequence_mean

Level = Literal["token", "sequence", "geometric"]
Scope = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class Weight(NamedPart, ABC):
    """The factor by which the loss of a token is multiplied."""

    @abstractmethod
    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        """`[M]`, from `log_w` `[M]` and the index of each token's sequence `[M]`."""


class Bounded(Weight):
    """A weight with a largest value."""

    level: Level = "token"
    """What `w` is: the ratio of the `token`, the product over its `sequence`, or the `geometric`
    mean over its sequence."""
    upper: float = Field(2.0, ge=1, le=MAX_BOUND)
    """c, the largest weight (`truncate`), or the largest `w` that is kept (`mask`)."""


class Truncate(Bounded):
    """`min(w, c)`: truncated importance sampling. fengyao.notion.site/off-policy-rl."""

    name: Literal["truncate"] = "truncate"

    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        return importance(log_w, sequence, self.level).clamp(max=self.upper)


class Mask(Bounded):
    """`w` if it is within `[lower, upper]`, else 0. With `lower: 0` this is masked importance
    sampling (richardli.xyz/rl-collapse), with `level: token` IcePop
    (ringtech.notion.site/icepop).
    """

    name: Literal["mask"] = "mask"
    lower: float = Field(0.0, ge=0, le=1)
    """Smallest `w` that is kept."""

    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        w = importance(log_w, sequence, self.level)
        return torch.where((w >= self.lower) & (w <= self.upper), w, torch.zeros_like(w))


class Rejection(NamedPart, ABC):
    """A rule by which tokens are not trained."""

    over_batch: ClassVar[bool] = False
    """Whether the rule compares the tokens of the whole batch. It is then computed once, before the
    first micro-batch, and needs `prox: recompute`."""

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        """`[M]` bool, from `log_w` `[M]` and the index of each token's sequence `[M]`. A rule has
        this method, or `keeps_of` if it needs more than the ratio."""
        raise NotImplementedError(f"{type(self).__name__} has neither `keeps` nor `keeps_of`")

    def keeps_of(self, log_w: Tensor, sequence: Tensor, behaviour: Tensor) -> Tensor:
        """As `keeps`, with `log π_b` `[M]`."""
        return self.keeps(log_w, sequence)


class Veto(Rejection):
    """Drops a sequence in which the `w` of any token is below `min_ratio`.
    richardli.xyz/rl-collapse.
    """

    name: Literal["veto"] = "veto"
    min_ratio: float = Field(1e-4, gt=0, lt=1)
    """Smallest `w` that a token may have."""

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        lowest = -over_sequence(-log_w, sequence, "amax")
        return lowest >= torch.log(torch.tensor(self.min_ratio))


class Divergence(Estimated, Rejection):
    """Keeps a token if an estimate of KL(π_b ‖ π_prox), whose k1 is `−log_w`, is within bounds. The
    estimate is that of the token, or the sum, mean or maximum over its sequence.
    richardli.xyz/rl-collapse.
    """

    name: Literal["divergence"] = "divergence"
    scope: Scope = "sequence_mean"
    """The quantity that is compared with the bounds."""
    lower: float | None = None
    """Smallest estimate that is trained; none: no lower bound."""
    upper: float
    """Largest estimate that is trained."""

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        estimate = self.estimator.of_log_ratio(-log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        if self.scope == "sequence_mean":
            estimate = sequence_mean(estimate, sequence)
        elif self.scope == "sequence_sum":
            estimate = over_sequence(estimate, sequence, "sum")
        elif self.scope == "sequence_max":
            estimate = over_sequence(estimate, sequence, "amax")
        keep = estimate <= self.upper
        return keep if self.lower is None else keep & (estimate >= self.lower)


class BinaryDivergence(Rejection):
    """Keeps a token if KL(B(π_b) ‖ B(π_prox)) and KL(B(π_prox) ‖ B(π_b)) are at most `upper`, where
    B(p) is the Bernoulli distribution of whether this token is sampled. KPop. Other than a bound on
    the ratio, it lets a rare token change its probability by a large factor.
    """

    name: Literal["binary_divergence"] = "binary_divergence"
    upper: float = Field(gt=0)
    """φ, the largest divergence in nats that is trained."""

    def keeps_of(self, log_w: Tensor, sequence: Tensor, behaviour: Tensor) -> Tensor:
        log_b = behaviour.double().clamp(max=0)
        log_prox = (log_b + log_w.double()).clamp(max=0)
        worst = torch.maximum(binary_kl(log_b, log_prox), binary_kl(log_prox, log_b))
        return worst <= self.upper


class SecondMoment(Rejection):
    """Drops the tokens with the largest `(log π_b − log π_prox)²` until the mean of the others is
    below τ. M2PO, arXiv 2510.01161. Needs `prox: recompute`.
    """

    name: Literal["second_moment"] = "second_moment"
    over_batch: ClassVar[bool] = True
    threshold: float = Field(0.04, gt=0)
    """τ, the bound on the mean square."""

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        squares = log_w.square()
        ordered, order = squares.sort()
        means = ordered.cumsum(0) / torch.arange(1, len(squares) + 1)
        keep = torch.zeros_like(squares, dtype=torch.bool)
        keep[order] = means < self.threshold
        return keep


WEIGHTS = Parts[Weight](Weight, (Truncate, Mask))
"""Registry of the weights for `algorithm.correction.weight`."""
REJECTIONS = Parts[Rejection](Rejection, (Veto, Divergence, BinaryDivergence, SecondMoment))
"""Registry of the rejections for `algorithm.correction.reject`."""


class Correction(Part):
    """Importance weights for the behaviour policy, and rules by which tokens are not trained."""

    weight: Annotated[Weight, WEIGHTS] | None = Truncate()
    """The importance weight, `truncate` or `mask`; none: the loss is not weighted."""
    reject: tuple[Annotated[Rejection, REJECTIONS], ...] = ()
    """Any of `veto`, `divergence`, `binary_divergence` and `second_moment`; a token is trained if
    all of them keep it."""

    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        """`[M]`, the factors of the policy loss, rejections not included."""
        return (
            torch.ones_like(log_w) if self.weight is None else self.weight.weights(log_w, sequence)
        )

    def keeps(self, log_w: Tensor, sequence: Tensor, behaviour: Tensor) -> Tensor:
        """`[M]` bool: False for tokens that a rejection drops, whose `log π_b` is `behaviour`.
        Rejections over the whole batch are not included."""
        kept = torch.ones_like(log_w, dtype=torch.bool)
        for part in self.reject:
            if not part.over_batch:
                kept = kept & part.keeps_of(log_w, sequence, behaviour)
        return kept


def importance(log_w: Tensor, sequence: Tensor, level: Level) -> Tensor:
    """`[M]`: `w` of each token, its product over the sequence, or its geometric mean over it."""
    if level == "sequence":
        log_w = over_sequence(log_w, sequence, "sum")
    elif level == "geometric":
        log_w = sequence_mean(log_w, sequence)
    return torch.exp(log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`[M]`: KL(B(p) ‖ B(q)) of Bernoulli distributions in nats, from log p and log q ≤ 0."""
    other = -torch.expm1(log_p)  # 1 − p
    apart = torch.log(other) - torch.log(-torch.expm1(log_q))
    return log_p.exp() * (log_p - log_q) + torch.where(other > 0, other * apart, 0.0)


def over_sequence(values: Tensor, sequence: Tensor, reduce: Literal["sum", "amax"]) -> Tensor:
    """`[M]`: for each token the sum or the maximum of `values` `[M]` over its sequence."""
    _, index = torch.unique(sequence, return_inverse=True)
    size = int(index.max()) + 1 if len(index) else 0
    out = values.new_zeros(size)
    return out.scatter_reduce(0, index, values, reduce, include_self=False)[index]
