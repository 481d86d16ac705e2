"""Schedules that contradict each other, or the run's length, are refused with numbers that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.test_config_numbers import loaded
from trainer.errors import ConfigError
from trainer.extras.sft.main import _check_warmup
from trainer.extras.sft.schedule import Schedule
from trainer.optimizer import Stepper
from trainer.optimizer_config import OptimizerConfig
from trainer.schedules import TRIAL_STEPS, warmup_beyond

STEPS_5 = "trainer.steps=5"
PPO = "algorithm.preset=ppo"
KL = "algorithm.kl={coefficient: 0, adaptive: {target: 0.1}}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([STEPS_5, "optimizer.warmup_steps=5"], ["optimizer.warmup_steps=5", STEPS_5]),
        (
            [STEPS_5, "optimizer.schedule=cosine", "optimizer.warmup_steps=4"],
            ["optimizer.warmup_steps=4", "optimizer.schedule=cosine", STEPS_5],
        ),
        (
            ["optimizer.min_lr_ratio=0.1"],
            ["optimizer.min_lr_ratio=0.1", "optimizer.schedule=constant"],
        ),
        (
            [STEPS_5, PPO, "algorithm.critic.warmup_steps=5"],
            ["algorithm.critic.warmup_steps=5", STEPS_5],
        ),
        (
            [STEPS_5, PPO, "algorithm.critic.optimizer.warmup_steps=400"],
            ["algorithm.critic.optimizer.warmup_steps=400", STEPS_5],
        ),
        (
            [PPO, "algorithm.critic.optimizer.min_lr_ratio=0.1"],
            ["algorithm.critic.optimizer.min_lr_ratio=0.1", "critic.optimizer.schedule=constant"],
        ),
        ([KL], ["algorithm.kl.adaptive", "algorithm.kl.coefficient=0"]),
        (
            ["rollout.tail_groups=2", "rollout.stale=mask"],
            ["rollout.tail_groups=2", "rollout.stale=mask"],
        ),
        (["trainer.stop_at_success=0.9"], ["trainer.stop_at_success=0.9", "eval.every=0"]),
        (
            [STEPS_5, "trainer.stop_at_success=0.9", "eval.every=5"],
            ["trainer.stop_at_success", "eval.every=5", STEPS_5],
        ),
        (["rollout.min_group_size=9"], ["rollout.min_group_size=9", "rollout.group_size=8"]),
    ],
)
def test_schedules_that_contradict_each_other_are_refused_with_both_keys(
    tmp_path: Path, words: list[str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, "", *words)
    (line,) = str(refused.value).splitlines()
    for name in named:
        assert name in line


def test_optimizer_of_each_policy_is_checked(tmp_path: Path) -> None:
    coder = "coder: {optimizer: {warmup_steps: 7}}"
    words = [
        STEPS_5,
        "model.lora={update: adapter, policy: planner}",
        "remote_agent.policies={big: planner, small: coder}",
    ]
    with pytest.raises(ConfigError, match=r"trainer\.policies\.coder\.optimizer\.warmup_steps=7"):
        loaded(tmp_path, "", *words, f"trainer.policies={{planner: {{}}, {coder}}}")
    frozen = coder.replace("{opt", "{frozen: true, opt")
    loaded(tmp_path, "", *words, f"trainer.policies={{planner: {{}}, {frozen}}}")


@pytest.mark.parametrize(
    "words", [["optimizer.warmup_steps=8"], [PPO, "algorithm.critic.warmup_steps=9"]]
)
def test_short_trial_of_a_longer_run_is_warned_about(tmp_path: Path, words: list[str]) -> None:
    trial = loaded(tmp_path, "", f"trainer.steps={TRIAL_STEPS}", *words)
    (warning,) = trial.warnings
    assert words[-1] in warning
    with pytest.raises(ConfigError, match=re.escape(words[-1])):
        loaded(tmp_path, "", f"trainer.steps={TRIAL_STEPS + 1}", *words)
    assert loaded(tmp_path, "", *words).warnings == ()


@given(
    steps=st.integers(TRIAL_STEPS + 1, TRIAL_STEPS + 4),
    epochs=st.integers(1, 3),
    mini_batches=st.integers(1, 3),
    warmup=st.integers(0, 60),
    critic=st.none() | st.integers(0, 7),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
@settings(max_examples=60, deadline=None)
def test_numbers_that_a_refusal_gives_are_the_bounds(
    tmp_path_factory: pytest.TempPathFactory,
    steps: int,
    epochs: int,
    mini_batches: int,
    warmup: int,
    critic: int | None,
    schedule: str,
) -> None:
    tmp_path = tmp_path_factory.mktemp("run")
    given = {
        "trainer.steps": steps,
        "algorithm.epochs": epochs,
        "algorithm.mini_batches": mini_batches,
        "optimizer.warmup_steps": warmup,
        "optimizer.schedule": schedule,
    }
    if critic is not None:
        given |= {"algorithm.preset": "ppo", "algorithm.critic.warmup_steps": critic}

    def refusal(**changed: int) -> list[tuple[str, int]]:
        """The keys that a refusal says to change, with their bounds; empty: accepted."""
        now = given | {key.replace("__", "."): value for key, value in changed.items()}
        try:
            loaded(tmp_path, "", *(f"{key}={value}" for key, value in now.items()))
        except ConfigError as error:
            found = re.findall(
                r"(?:lower|raise) (\S+?)(?:=\d+)? to at (?:most|least) (\d+)", str(error)
            )
            return [(key, int(bound)) for key, bound in found]
        return []

    while told := refusal():  # the critic's warm-up first: it leaves the policy no step to judge
        (lowered, most), (raised, least) = told
        assert raised == "trainer.steps"
        assert lowered not in dict(refusal(trainer__steps=least))
        if least - 1 > TRIAL_STEPS:
            assert lowered in dict(refusal(trainer__steps=least - 1))
        given[lowered] = most + 1
        assert lowered in dict(refusal())
        given[lowered] = most


@given(
    total=st.integers(1, 30),
    warmup=st.integers(0, 40),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)
@settings(max_examples=100, deadline=None)
def test_warmups_that_are_accepted_reach_the_peak_and_the_last_learning_rate(
    total: int, warmup: int, schedule: str
) -> None:
    falls = schedule != "constant"
    config = OptimizerConfig.model_validate(
        {"lr": 1.0, "warmup_steps": warmup, "schedule": schedule, "min_lr_ratio": 0.2 * falls}
    )
    stepper = Stepper(torch.nn.Linear(1, 1), config, total)
    rates = [stepper.step()["lr"] for _ in range(total)]
    reached = max(rates) == pytest.approx(1.0)
    fell = not falls or rates[-1] == pytest.approx(0.2)
    if warmup:
        assert (warmup_beyond("optimizer", config, total) is None) == (reached and fell)


@pytest.mark.parametrize(("epochs", "refused"), [(3, True), (4, False)])
def test_warmup_of_fine_tuning_is_compared_with_the_steps_that_its_sessions_make(
    epochs: int, refused: bool
) -> None:
    schedule = Schedule([None] * 7, batch_sessions=4, epochs=epochs, seed=0)  # type: ignore[list-item]
    optimizer = OptimizerConfig(warmup_steps=6)
    if not refused:
        _check_warmup(optimizer, schedule)
        return
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps=6.*raise sft\.epochs=3"):
        _check_warmup(optimizer, schedule)
