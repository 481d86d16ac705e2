"""Section `algorithm`: which parts make up the algorithm, each named and with its own bounds.

A part is chosen by its `name`, and its settings stand beside it; the union of a part's classes is
its registry. `preset` starts from a paper's combination (`presets.py`), over which any other key
may be set. Ranges and combinations are checked here, never in a loss.

Example:
    algorithm: {preset: dapo, loss: {clip_high: 0.3}, kl: {coefficient: 0.001, estimator: k3}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from trainer.algorithms import advantages, correction, policy_losses
from trainer.algorithms.advantages import Baseline
from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.correction import Level, Scope
from trainer.algorithms.kl import Estimator
from trainer.algorithms.policy_losses import PolicyLoss
from trainer.algorithms.presets import PRESETS, merge
from trainer.policy.optimizer import OptimizerConfig

Eps = Annotated[float, Field(ge=0)]
ClipLow = Annotated[float, Field(ge=0, le=1)]
ClipHigh = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Advantages: `outcome(rewards [R], group [R], tokens [R])` → a baseline or advantages `[R]`.


class Grpo(Part):
    name: Literal["grpo"] = "grpo"
    eps: Eps = 1e-6

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.grpo(rewards, group, eps=self.eps)


class DrGrpo(Part):
    name: Literal["dr_grpo"] = "dr_grpo"

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.dr_grpo(rewards, group)


class Rloo(Part):
    name: Literal["rloo"] = "rloo"

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.rloo(rewards, group)


class ReinforcePp(Part):
    name: Literal["reinforce++"] = "reinforce++"
    eps: Eps = 1e-6

    def outcome(self, rewards: Tensor, _group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.reinforce_pp(rewards, eps=self.eps)


class ReinforcePpBaseline(Part):
    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    eps: Eps = 1e-6

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.reinforce_pp_baseline(rewards, group, eps=self.eps)


class LitePpo(Part):
    name: Literal["lite_ppo"] = "lite_ppo"
    eps: Eps = 1e-6

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.lite_ppo(rewards, group, eps=self.eps)


class Opo(Part):
    name: Literal["opo"] = "opo"

    def outcome(self, rewards: Tensor, group: Tensor, tokens: Tensor) -> Baseline:
        return advantages.opo(rewards, group, tokens)


class Gpg(Part):
    name: Literal["gpg"] = "gpg"

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Baseline:
        return advantages.gpg(rewards, group)


class PassAtK(Part):
    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    threshold: float = 0.5
    """A rollout is correct from this reward on."""

    def outcome(self, rewards: Tensor, group: Tensor, _tokens: Tensor) -> Tensor:
        return advantages.pass_at_k(rewards, group, k=self.k, threshold=self.threshold)


class Accepted(Part):
    name: Literal["accepted"] = "accepted"
    threshold: float = 0.5
    """Rollouts with at least this reward are imitated (advantage 1), others not (0)."""

    def outcome(self, rewards: Tensor, _group: Tensor, _tokens: Tensor) -> Tensor:
        return advantages.accepted(rewards, threshold=self.threshold)


class Gae(Part):
    """Needs `algorithm.critic`."""

    name: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    level: Literal["token", "turn"] = "token"
    """What counts as one action."""
    normalise: Literal["rollout", "none"] = "rollout"
    """Whiten over the batch, each rollout with the same weight."""


Advantage = Annotated[
    Grpo
    | DrGrpo
    | Rloo
    | ReinforcePp
    | ReinforcePpBaseline
    | LitePpo
    | Opo
    | Gpg
    | PassAtK
    | Accepted
    | Gae,
    Field(discriminator="name"),
]


# Losses: `(logprobs, prox, advantages, sequence)`, all `[M]` → `PolicyLoss`.


class Ppo(Part):
    name: Literal["ppo"] = "ppo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(None, gt=1)
    """For negative advantages the loss is at most this times their size; 3 in the paper."""

    def losses(self, logp: Tensor, prox: Tensor, adv: Tensor, _sequence: Tensor) -> PolicyLoss:
        return policy_losses.ppo(
            logp,
            prox,
            adv,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


class Gspo(Part):
    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4

    def losses(self, logp: Tensor, prox: Tensor, adv: Tensor, sequence: Tensor) -> PolicyLoss:
        return policy_losses.gspo(
            logp, prox, adv, sequence, clip_low=self.clip_low, clip_high=self.clip_high
        )


class Cispo(Part):
    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """1 does not bind, as in the paper."""
    clip_high: ClipHigh = 0.2

    def losses(self, logp: Tensor, prox: Tensor, adv: Tensor, _sequence: Tensor) -> PolicyLoss:
        return policy_losses.cispo(
            logp, prox, adv, clip_low=self.clip_low, clip_high=self.clip_high
        )


class Sapo(Part):
    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)

    def losses(self, logp: Tensor, prox: Tensor, adv: Tensor, _sequence: Tensor) -> PolicyLoss:
        return policy_losses.sapo(
            logp, prox, adv, tau_positive=self.tau_positive, tau_negative=self.tau_negative
        )


class Reinforce(Part):
    name: Literal["reinforce"] = "reinforce"

    def losses(self, logp: Tensor, _prox: Tensor, adv: Tensor, _sequence: Tensor) -> PolicyLoss:
        return policy_losses.reinforce(logp, adv)


Loss = Annotated[Ppo | Gspo | Cispo | Sapo | Reinforce, Field(discriminator="name")]


# Correction for the behaviour policy: weights `[M]`, and masks `[M]`.


class Truncate(Part):
    name: Literal["truncate"] = "truncate"
    level: Level = "token"
    upper: float = Field(2.0, ge=1)

    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        w = correction.importance(log_w, sequence, self.level)
        return correction.truncated(w, upper=self.upper)


class Mask(Part):
    """IcePop with `level: token`; masked importance sampling with `lower: 0`."""

    name: Literal["mask"] = "mask"
    level: Level = "token"
    lower: float = Field(0.0, ge=0, le=1)
    upper: float = Field(2.0, ge=1)

    def weights(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        w = correction.importance(log_w, sequence, self.level)
        return correction.masked(w, lower=self.lower, upper=self.upper)


class Veto(Part):
    name: Literal["veto"] = "veto"
    min_ratio: float = Field(1e-4, gt=0, lt=1)

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        return correction.veto(log_w, sequence, min_ratio=self.min_ratio)


class Divergence(Part):
    name: Literal["divergence"] = "divergence"
    estimator: Estimator = "k3"
    scope: Scope = "sequence_mean"
    lower: float | None = None
    upper: float

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        return correction.within(
            log_w,
            sequence,
            estimator=self.estimator,
            scope=self.scope,
            lower=self.lower,
            upper=self.upper,
        )


class SecondMoment(Part):
    """M2PO. It ranks the tokens of the whole batch, so it needs `prox: recompute`."""

    name: Literal["second_moment"] = "second_moment"
    threshold: float = Field(0.04, gt=0)


class Correction(Part):
    weight: Annotated[Truncate | Mask, Field(discriminator="name")] | None = None
    reject: tuple[
        Annotated[Veto | Divergence | SecondMoment, Field(discriminator="name")], ...
    ] = ()


# The rest.


class Overlong(Part):
    max_tokens: int = Field(ge=1)
    """Trained tokens of a rollout at which the penalty is all of `factor`."""
    buffer_tokens: int = Field(ge=1)
    """How many tokens before that it starts."""
    factor: float = Field(1.0, ge=0)


class RewardShaping(Part):
    """`clip((R + bias) · scale, low, high)` plus the overlong penalty."""

    bias: float = 0.0
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    overlong: Overlong | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class AdaptiveKl(Part):
    target: float = Field(gt=0)
    horizon: float = Field(10.0, ge=1)
    """In updates: how slowly the coefficient follows."""


class Kl(Part):
    """Divergence from a frozen reference."""

    coefficient: float = Field(1e-3, ge=0)
    estimator: Estimator = "k3"
    where: Literal["loss", "reward"] = "loss"
    adaptive: AdaptiveKl | None = None
    """None: the coefficient is fixed."""
    reference: Path | None = None
    """Checkpoint folder; None: the weights that training started from."""


class Distillation(Part):
    """Adds `coefficient · KL(π_θ ‖ teacher)`, estimated on the sampled tokens, to the loss."""

    teacher: Path
    coefficient: float = Field(1.0, gt=0)
    estimator: Estimator = "k2"
    """k2's gradient is the reverse KL's; k1's is 0 in expectation (log π_θ minus log π_T alone)."""


class CriticConfig(Part):
    path: Path | None = None
    """Checkpoint whose backbone the critic starts from; None: the policy's."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    clip: float | None = Field(0.5, gt=0)
    """How far a value may move from where it was at the start of the update; None: freely."""
    huber_delta: float | None = Field(None, gt=0)
    """None: squared error."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which only the critic learns."""


class AlgorithmConfig(Part):
    preset: str | None = None
    """A paper's combination, over which the other keys are set: see `presets.py`."""
    reward: RewardShaping = RewardShaping()
    groups: Literal["all", "with_signal"] = "all"
    """`with_signal` leaves out groups whose rewards are all the same."""
    advantage: Advantage = Grpo()
    loss: Loss = Ppo()
    aggregation: Aggregation = "rollout_mean"
    aggregation_tokens: int | None = Field(None, ge=1)
    """The constant of `sequence_mean_token_sum_norm`."""
    prox: Literal["recompute", "log_linear", "reuse", "behaviour"] = "recompute"
    """π_prox, at the start of the update: by a forward pass of its own; approximated between
    π_b and π_θ by versions; π_θ's of the same pass (one mini-batch, one epoch); or π_b itself,
    so that there is nothing to correct."""
    correction: Correction = Correction(weight=Truncate())
    kl: Kl | None = None
    distillation: Distillation | None = None
    entropy_coefficient: float = Field(0.0, ge=0)
    critic: CriticConfig | None = None
    """Needed by, and only by, `advantage: gae`."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass, each on a share of the rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("preset") is None:
            return data
        name = data["preset"]
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; known are {', '.join(sorted(PRESETS))}")
        return merge(PRESETS[name], data)

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if isinstance(self.advantage, Gae) != (self.critic is not None):
            raise ValueError("advantage gae and critic need each other: set both or neither")
        if self.aggregation == "sequence_mean_token_sum_norm" and self.aggregation_tokens is None:
            raise ValueError(f"aggregation {self.aggregation} needs aggregation_tokens")
        if self.prox == "reuse" and self.epochs * self.mini_batches > 1:
            raise ValueError(
                f"prox reuse allows one optimizer step a batch, not epochs {self.epochs} and "
                f"mini_batches {self.mini_batches}; use recompute"
            )
        corrects = self.correction.weight is not None or self.correction.reject
        if self.prox == "behaviour" and corrects:
            raise ValueError("prox behaviour leaves nothing to correct; set correction: {}")
        moments = any(isinstance(part, SecondMoment) for part in self.correction.reject)
        if moments and self.prox != "recompute":
            raise ValueError(f"second_moment needs prox recompute, not {self.prox}")
        return self
