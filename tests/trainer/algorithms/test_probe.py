"""Settings under which nothing can be learned are found; those that learn are not refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.algorithms import AlgorithmConfig
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.policy_losses import LOSSES
from trainer.algorithms.presets import PRESETS
from trainer.algorithms.probe import broken_parts, settings_without_effect


def found(group_size: int = 8, **settings: Any) -> list[str]:
    return list(settings_without_effect(AlgorithmConfig.model_validate(settings), group_size))


@pytest.mark.parametrize("group_size", [2, 3, 8, 64])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_learn(preset: str, group_size: int) -> None:
    if preset == "pass_at_k" and group_size <= 4:
        return
    assert found(group_size, preset=preset) == []


@pytest.mark.parametrize("name", LOSSES.names)
def test_losses_learn(name: str) -> None:
    assert found(loss=name) == []


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names) - {"none"}))
def test_advantages_learn(name: str) -> None:
    critic: dict[str, Any] = {"critic": {}} if name == "gae" else {}
    assert found(advantage=name, **critic) == []


@pytest.mark.parametrize("name", ["reinforce++", "accepted"])
def test_advantages_that_compare_a_batch_learn_from_groups_of_one(name: str) -> None:
    assert found(1, advantage=name) == []


@pytest.mark.parametrize(("k", "group_size"), [(8, 8), (9, 8), (4, 2), (64, 64)])
def test_pass_at_k_of_the_whole_group_trains_nothing(k: int, group_size: int) -> None:
    (line,) = found(group_size, advantage={"name": "pass_at_k", "k": k})
    assert f"algorithm.advantage.k below rollout.group_size={group_size}" in line
    assert found(group_size, advantage={"name": "pass_at_k", "k": 1}) == []


def test_scale_of_0_trains_nothing() -> None:
    (line,) = found(reward={"scale": 0})
    assert "another algorithm.reward.scale than 0" in line


@pytest.mark.parametrize(
    "reward",
    [{"low": 5.0}, {"high": 0.0}, {"low": 0.2, "high": 0.8}, {"scale": -1}, {"bias": -0.5}],
)
def test_bounds_that_leave_some_reward_are_accepted(reward: dict[str, float]) -> None:
    assert found(reward=reward) == []


def test_bounds_that_leave_one_reward_are_refused() -> None:
    (line,) = found(reward={"low": 0.5, "high": 0.5})
    assert "other bounds of algorithm.reward" in line


def test_threshold_above_usual_rewards_is_accepted() -> None:
    assert found(advantage={"name": "accepted", "threshold": 37.5}) == []
    assert found(advantage={"name": "pass_at_k", "threshold": -3}) == []


@pytest.mark.parametrize("groups", ["all", "with_signal"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_k1_in_the_loss_is_refused_because_its_gradient_is_0_in_expectation(
    estimator: str, groups: str
) -> None:
    lines = found(groups=groups, kl={"estimator": estimator, "where": "loss", "coefficient": 0.1})
    assert bool(lines) == (estimator == "k1")
    assert (
        found(groups=groups, kl={"estimator": estimator, "where": "reward", "coefficient": 0.1})
        == []
    )
    distilled = found(
        advantage="none", distillation={"teacher": "t", "estimator": estimator, "coefficient": 1}
    )
    assert bool(distilled) == (estimator == "k1")


OWN = "tests.trainer.algorithms.test_probe"


def centred(returns: Any) -> Any:
    return returns.centred(lambda values, group, tokens: values.mean().expand_as(values))


def misspelt(returns: Any) -> Any:
    return returns.centered(1)


def of_one_token(returns: Any) -> Any:
    return returns.share[:1]


def without_gradient(logprobs: Any, prox: Any, advantages: Any, sequence: Any) -> Any:
    return (advantages * prox).detach()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"advantage": f"{OWN}:misspelt"}, "has no attribute 'centered'"),
        ({"advantage": f"{OWN}:of_one_token"}, "must return one advantage for each token"),
        ({"loss": f"{OWN}:without_gradient"}, "does not require grad"),
    ],
)
def test_own_parts_that_fail_are_found_on_an_invented_batch(
    section: dict[str, Any], said: str
) -> None:
    (problem,) = broken_parts(AlgorithmConfig(**section), 8)
    assert said in problem
    (key, name) = next(iter(section.items()))
    assert problem.startswith(f"algorithm.{key}={name} fails on an invented batch")


def test_own_parts_that_work_are_accepted() -> None:
    assert list(broken_parts(AlgorithmConfig(advantage=f"{OWN}:centred"), 8)) == []
    assert list(broken_parts(AlgorithmConfig(), 8)) == []
