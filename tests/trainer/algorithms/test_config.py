"""Section `algorithm`: parts by name or from outside the package, and settings that are refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from tests.trainer.algorithms.test_advantages import batch_of, trial
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.advantages import Advantage, Estimate, Gae, Grpo
from trainer.algorithms.aggregation import RolloutMean, SequenceMeanTokenSum, TokenMean
from trainer.algorithms.correction import Mask, Rejection
from trainer.algorithms.kl import K2
from trainer.algorithms.policy_losses import Gspo, Loss, PolicyLoss, Ppo
from trainer.algorithms.presets import PRESETS
from trainer.algorithms.returns import Returns, group_sum


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    config = AlgorithmConfig.model_validate({"preset": preset})
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


def test_given_keys_override_the_preset() -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "loss": {"clip_high": 0.3}})
    assert isinstance(config.loss, Ppo)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.3)
    assert config.groups == "with_signal"


def test_part_with_another_name_replaces_the_part_of_the_preset() -> None:
    config = AlgorithmConfig.model_validate(
        {"preset": "decoupled_ppo", "loss": {"name": "gspo"}, "correction": {"reject": []}}
    )
    assert config.loss == Gspo()
    assert isinstance(config.correction.weight, Mask)
    critic = AlgorithmConfig.model_validate({"preset": "ppo", "critic": {"clip": None}}).critic
    assert critic is not None
    assert critic.clip is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"preset": "pppo"}, "preset 'pppo' is unknown; the presets are cispo, dapo"),
        (
            {"advantage": {"name": "grop"}},
            "advantage: 'grop' is unknown; use one of accepted, dr_grpo, gae, "
            ".* package.module:name",
        ),
        ({"advantage": {"name": "gae"}}, "need each other; set both or neither"),
        ({"critic": {}}, "need each other; set both or neither"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "needs aggregation_tokens"),
        ({"prox": "reuse", "mini_batches": 2}, "one optimizer step per batch"),
        ({"prox": "behaviour"}, "leaves nothing to correct"),
        (
            {"prox": "reuse", "correction": {"reject": [{"name": "second_moment"}]}},
            "needs prox recompute",
        ),
        ({"loss": {"name": "ppo", "dual_clip": 1.0}}, "greater than 1"),
        ({"loss": {"name": "ppo", "clip_low": 1.5}}, "less than or equal to 1"),
        ({"loss": {"name": "gspo", "tau_positive": 1}}, "Extra inputs are not permitted"),
        ({"correction": {"weight": {"name": "mask", "lower": 2}}}, "less than or equal to 1"),
        ({"reward": {"low": 1, "high": 0}}, r"low \(1.0\) is above high \(0.0\)"),
        ({"aggregation_tokens": 7}, "not of the default; remove it"),
        ({"kl": {"estimator": "k4"}}, "estimator: 'k4' is unknown; use one of abs, k1, k2, k3, or"),
        ({"loss": {"clip_low": 0.1}}, "give a name, one of ppo, gspo"),
        (
            {"loss": "no.such.module:Loss"},
            "loss: cannot import no.such.module:Loss: No module named 'no'",
        ),
        (
            {"loss": "json:Missing"},
            "loss: cannot import json:Missing: module 'json' has no attribute",
        ),
        ({"loss": f"{__name__}:Median"}, r"is not a subclass of trainer\.algorithms\..*\.Loss"),
        ({"epochs": 0}, "greater than or equal to 1"),
    ],
)
def test_invalid_settings_and_combinations_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(data)


def test_settings_of_a_part_keep_their_bounds_in_python() -> None:
    with pytest.raises(ValidationError):
        Gae(gamma=1.1)


def test_name_alone_takes_the_default_settings_of_the_part() -> None:
    config = AlgorithmConfig.model_validate(
        {"loss": "gspo", "aggregation": "token_mean", "kl": {"estimator": "k2"}}
    )
    assert config.kl is not None
    assert (config.loss, config.aggregation, config.kl.estimator) == (Gspo(), TokenMean(), K2())
    assert AlgorithmConfig().aggregation == RolloutMean()


def test_aggregation_tokens_sets_the_constant_of_the_aggregation() -> None:
    name = "sequence_mean_token_sum_norm"
    config = AlgorithmConfig.model_validate({"aggregation": name, "aggregation_tokens": 512})
    assert config.aggregation == SequenceMeanTokenSum(max_tokens=512)
    config = AlgorithmConfig.model_validate({"preset": "dr_grpo", "aggregation_tokens": 64})
    assert config.aggregation == SequenceMeanTokenSum(max_tokens=64)
    null = AlgorithmConfig.model_validate({"preset": "grpo", "aggregation_tokens": None})
    assert null == AlgorithmConfig.model_validate({"preset": "grpo"})


class Median(Advantage):
    """An advantage from outside the package: `w (R - median)`."""

    weight: float = Field(1.0, gt=0)

    def estimate(self, returns: Returns) -> Estimate:
        median = returns.rewards.median()
        return Estimate(self.weight * (returns.rewards - median)[returns.rollout])


class Power(Loss):
    """A loss from outside the package."""

    power: Literal[2, 4] = 2

    def losses(
        self, logprobs: Tensor, prox: Tensor, advantages: Tensor, sequence: Tensor
    ) -> PolicyLoss:
        losses = (logprobs - prox) ** self.power
        return PolicyLoss(losses, torch.zeros_like(losses, dtype=torch.bool))


class First(Rejection):
    """A rejection from outside the package: keeps the first sequence."""

    def keeps(self, log_w: Tensor, sequence: Tensor) -> Tensor:
        return sequence == 0


OUTSIDE: dict[str, Any] = {
    "advantage": {"name": f"{__name__}:Median", "weight": 2.0},
    "loss": {"name": f"{__name__}:Power", "power": 4},
    "correction": {"reject": [f"{__name__}:First"]},
}


def test_parts_from_outside_the_package_train_with_their_own_settings() -> None:
    algorithm = Algorithm(AlgorithmConfig.model_validate(OUTSIDE))
    batch = batch_of([trial(str(i), float(i), 1, tokens=1) for i in range(3)])
    algorithm.compute_advantages(batch)
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [-2.0, 0.0, 2.0]
    batch.prox_logprobs = torch.zeros(3)
    logprobs = torch.full((3,), 2.0)
    result = algorithm.loss(batch)(logprobs, logprobs, torch.arange(3))
    assert result.losses.tolist() == pytest.approx([16 / 3, 0.0, 0.0])


def test_configuration_with_parts_from_outside_is_stored_and_read_back() -> None:
    config = AlgorithmConfig.model_validate(OUTSIDE)
    assert config.model_dump(mode="json")["loss"] == OUTSIDE["loss"]
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config
    in_python = AlgorithmConfig(advantage=Median(weight=2.0))
    stored = AlgorithmConfig.model_validate({"advantage": Median(weight=2.0)}).model_dump()
    assert AlgorithmConfig.model_validate(stored).advantage.name == OUTSIDE["advantage"]["name"]
    assert in_python.advantage == config.advantage


def test_settings_of_a_part_from_outside_are_checked_and_named() -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate({"advantage": OUTSIDE["advantage"] | {"weight": 0}})
    assert caught.value.errors()[0]["loc"] == ("advantage", "weight")


def test_advantage_from_outside_can_centre_by_a_baseline_of_its_own() -> None:
    class HalfOfSum(Advantage):
        def estimate(self, returns: Returns) -> Estimate:
            return Estimate(returns.centred(lambda v, group, _tokens: group_sum(v, group) / 2))

    batch = batch_of([trial("a", 1.0, 1), trial("b", 0.0, 1)])
    for part in (HalfOfSum(), Grpo()):
        Algorithm(AlgorithmConfig(advantage=part)).compute_advantages(batch)
        assert batch.advantages is not None
        assert batch.advantages[0] > 0 > batch.advantages[-1]
