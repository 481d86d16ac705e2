"""Section `algorithm`: which parts make up the algorithm, each named and with its own settings.

`preset` starts from a paper's combination (`presets.py`), over which any other key may be set.
Ranges and combinations are checked here, never in a loss.

Example:
    algorithm: {preset: dapo, loss: {clip_high: 0.3}, kl: {coefficient: 0.001, estimator: k3}}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from proxy.settings.section import Common
from trainer.algorithms.advantages import ADVANTAGES, Advantage, Grpo
from trainer.algorithms.aggregation import AGGREGATIONS, Aggregation, RolloutMean
from trainer.algorithms.correction import Correction
from trainer.algorithms.kl import Distillation, Kl
from trainer.algorithms.part import MAX_FACTOR, Part
from trainer.algorithms.policy_losses import LOSSES, Loss, Ppo
from trainer.algorithms.presets import PRESETS, merge
from trainer.algorithms.shaping import RewardShaping
from trainer.algorithms.value_losses import CriticConfig

CONSTANT_NORM = "sequence_mean_token_sum_norm"


class AlgorithmConfig(Part):
    """Section `algorithm`. A part is given by its name, or as a mapping of its name and settings;
    `module:Class` names a part of your own (a subclass of the kind's protocol).
    """

    preset: Common[str | None] = None
    """Name of a paper's combination, which the other keys override; see `presets.py`."""
    reward: RewardShaping = RewardShaping()
    groups: Literal["all", "with_signal"] = "all"
    """Groups that are trained on; `with_signal` leaves out groups whose rewards are all equal, up
    to rounding, also those of single turns if the advantage uses these."""
    advantage: Common[Annotated[Advantage, ADVANTAGES]] = Grpo()
    """How rewards become advantages."""
    loss: Common[Annotated[Loss, LOSSES]] = Ppo()
    """The policy's loss."""
    aggregation: Annotated[Aggregation, AGGREGATIONS] = RolloutMean()
    """How the losses of tokens become the loss of a step. The key `aggregation_tokens: N` next to
    it is short for the setting `max_tokens` of `sequence_mean_token_sum_norm`."""
    prox: Literal["recompute", "log_linear", "reuse", "behaviour"] = "recompute"
    """How π_prox, the policy at the start of the update, is computed. `recompute`: by a forward
    pass over the batch before the update; the other values avoid this pass. `log_linear`:
    interpolated between π_b and π_θ by the versions of the weights. `reuse`: π_θ of the training
    pass itself (only with one optimizer step per batch). `behaviour`: π_b, so that there is nothing
    to correct."""
    correction: Correction = Correction()
    kl: Common[Kl | None] = None
    """Divergence from a reference model; none: no reference is loaded."""
    distillation: Distillation | None = None
    """Distillation from a teacher; none: no teacher is loaded."""
    entropy_coefficient: float = Field(0.0, ge=0, le=MAX_FACTOR)
    """Weight of the entropy bonus in the loss."""
    critic: CriticConfig | None = None
    """The critic; required by an advantage that uses values (`gae`), and refused with any other."""
    epochs: int = Field(1, ge=1)
    """Number of passes over a batch."""
    mini_batches: Common[int] = Field(1, ge=1)
    """Number of optimizer steps per pass, each on a part of the rollouts."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("preset")
        if name is not None:
            if name not in PRESETS:
                raise ValueError(
                    f"preset {name!r} is unknown; the presets are {', '.join(sorted(PRESETS))}"
                )
            data = merge(PRESETS[name], data)
        return _with_aggregation_tokens(data)

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.advantage.needs_values != (self.critic is not None):
            raise ValueError(
                f"advantage {self.advantage.name} and critic: an advantage that uses values (gae)"
                " and critic need each other; set both or neither"
            )
        if self.prox == "reuse" and self.epochs * self.mini_batches > 1:
            raise ValueError(
                f"prox reuse allows one optimizer step per batch, not epochs {self.epochs} and "
                f"mini_batches {self.mini_batches}; use recompute"
            )
        corrects = self.correction.weight is not None or self.correction.reject
        if self.prox == "behaviour" and corrects:
            raise ValueError(
                "prox behaviour leaves nothing to correct; set correction: {weight: null}"
            )
        for part in self.correction.reject:
            if part.over_batch and self.prox != "recompute":
                raise ValueError(f"{part.name} needs prox recompute, not {self.prox}")
        return self


def _with_aggregation_tokens(data: dict[str, Any]) -> dict[str, Any]:
    """The keys, with `aggregation_tokens: N` moved into the section of the aggregation."""
    tokens = data.get("aggregation_tokens")
    data = {key: value for key, value in data.items() if key != "aggregation_tokens"}
    given = data.get("aggregation")
    name = given.get("name") if isinstance(given, dict) else given
    if name != CONSTANT_NORM:
        if tokens is not None:
            raise ValueError(
                f"aggregation_tokens={tokens} is a setting of aggregation {CONSTANT_NORM}, not of"
                f" {name or 'the default'}; remove it"
            )
        return data
    settings = dict(given) if isinstance(given, dict) else {"name": name}
    if tokens is not None:
        settings["max_tokens"] = tokens
    if settings.get("max_tokens") is None:
        raise ValueError(f"aggregation {name} needs aggregation_tokens")
    return data | {"aggregation": settings}
