"""Combinations and ranges are refused in the configuration, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.config import Gae, Gspo, Mask, Ppo
from trainer.algorithms.presets import PRESETS


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    config = AlgorithmConfig.model_validate({"preset": preset})
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


def test_keys_are_set_over_the_preset() -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "loss": {"clip_high": 0.3}})
    assert isinstance(config.loss, Ppo)
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.3)
    assert config.groups == "with_signal"


def test_another_part_replaces_the_presets() -> None:
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
        ({"preset": "pppo"}, "preset 'pppo' is unknown; known are cispo, dapo"),
        ({"advantage": {"name": "grop"}}, "does not match any of the expected tags"),
        ({"advantage": {"name": "gae"}}, "gae and critic need each other"),
        ({"critic": {}}, "gae and critic need each other"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "needs aggregation_tokens"),
        ({"prox": "reuse", "mini_batches": 2}, "one optimizer step a batch"),
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
        ({"epochs": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(data)


def test_gae_takes_its_bounds() -> None:
    with pytest.raises(ValidationError):
        Gae(gamma=1.1)
