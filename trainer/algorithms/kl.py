"""Divergence of the policy from another model, from the log-probabilities of sampled tokens.

Source of the estimators: Schulman, Approximating KL divergence, joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.part import MAX_FACTOR, NamedPart, Part, Parts

LOG_RATIO_BOUND = 20.0
"""Bound on a log-ratio before an exponential, so that no float32 overflows; the same as verl's."""


class Estimator(NamedPart, ABC):
    """An estimate of KL(π ‖ other) per token."""

    @abstractmethod
    def of_log_ratio(self, k1: Tensor) -> Tensor:
        """The estimate from `k1 = log π − log other`; any shape."""

    def divergence(self, logprobs: Tensor, other: Tensor) -> Tensor:
        """The estimate from the log-probabilities of the sampled tokens under π (`logprobs`) and
        under the other model (`other`)."""
        return self.of_log_ratio(logprobs - other)


class K1(Estimator):
    """`k1 = log π − log other`: unbiased, signed."""

    name: Literal["k1"] = "k1"

    def of_log_ratio(self, k1: Tensor) -> Tensor:
        return k1


class K2(Estimator):
    """`½ k1²`: has the gradient of the reverse KL."""

    name: Literal["k2"] = "k2"

    def of_log_ratio(self, k1: Tensor) -> Tensor:
        return 0.5 * k1.square()


class K3(Estimator):
    """`e^{−k1} − 1 + k1`: unbiased, never negative."""

    name: Literal["k3"] = "k3"

    def of_log_ratio(self, k1: Tensor) -> Tensor:
        k1 = k1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return torch.exp(-k1) - 1 + k1


class Absolute(Estimator):
    """`|k1|`."""

    name: Literal["abs"] = "abs"

    def of_log_ratio(self, k1: Tensor) -> Tensor:
        return k1.abs()


ESTIMATORS = Parts[Estimator](Estimator, (K1, K2, K3, Absolute))
"""Registry of the estimators for the keys `estimator`."""


class Estimated(Part):
    """The key of the parts that estimate a divergence."""

    estimator: Annotated[Estimator, ESTIMATORS] = K3()
    """The estimate of the divergence: `k1`, `k2`, `k3` or `abs`. As a loss, `k2` has the gradient
    of the reverse KL; the gradient of `k1` is 0 in expectation."""


class AdaptiveKl(Part):
    """`β · (1 + clip(KL / target − 1, −0.2, 0.2) / horizon)`: raises the coefficient if the
    divergence is above its target, and lowers it if it is below. Ziegler et al., arXiv 1909.08593,
    section 2.2.
    """

    target: float = Field(gt=0)
    """The intended divergence per token, in nats."""
    horizon: float = Field(10.0, ge=1)
    """Number of updates over which the coefficient changes by about a fifth at most."""

    def adapted(self, coefficient: float, kl: float) -> float:
        """The coefficient after an update whose mean divergence was `kl`, at most MAX_FACTOR."""
        error = max(-0.2, min(0.2, kl / self.target - 1))
        return min(coefficient * (1 + error / self.horizon), MAX_FACTOR)


class Kl(Estimated):
    """Divergence from a frozen reference, in the loss or in the reward."""

    coefficient: float = Field(1e-3, ge=0, le=MAX_FACTOR)
    """β, the weight of the divergence."""
    where: Literal["loss", "reward"] = "loss"
    """`loss`: `β KL` is added to the loss of each token. `reward`: `-β KL` of a token is added to
    the return of the token and of the tokens before it on its path."""
    adaptive: AdaptiveKl | None = None
    """Adapts the coefficient; none: it is fixed."""
    reference: Path | None = None
    """Checkpoint folder of the reference; none: the weights that training started from."""


class Distillation(Estimated):
    """Adds `coefficient · KL(π_θ ‖ teacher)`, estimated on the sampled tokens, to the loss.

    On-policy distillation, arXiv 2306.13649.
    """

    teacher: str = Field(min_length=1)
    """Checkpoint folder of the teacher, which the trainer loads; or the URL of a running vLLM that
    serves it, for which `rollout.temperature` must be 1. It must have the policy's tokenizer."""
    concurrency: int = Field(8, ge=1)
    """Number of sequences that a teacher at a URL scores at the same time."""
    coefficient: float = Field(1.0, gt=0, le=MAX_FACTOR)
    """Weight of the divergence in the loss."""
    estimator: Annotated[Estimator, ESTIMATORS] = K2()

    @property
    def engine_url(self) -> str | None:
        """The URL of a teacher that a running vLLM serves; None: it is a checkpoint."""
        return self.teacher if self.teacher.startswith(("http://", "https://")) else None

    @property
    def checkpoint(self) -> Path | None:
        """The folder of a teacher that the trainer loads; None: a vLLM serves it."""
        return Path(self.teacher) if self.engine_url is None else None
