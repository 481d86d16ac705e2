"""Engines that sleep on the trainer's GPU: when memory is freed, and which errors count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import WeightSyncError
from trainer.learning.learner import Learner
from trainer.ranks_config import RanksConfig


class Control:
    """The engines' control, which records what it is asked, beside `torch.cuda`."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.refuses = ""
        self.is_dead = False

    def sleep(self) -> None:
        self._do("sleep")

    def wake_up(self) -> None:
        self._do("wake up")

    def lost_in_update(self, _: float) -> WeightSyncError | None:
        return WeightSyncError("dead") if self.is_dead else None

    def _do(self, what: str) -> None:
        self.events.append(what)
        if what == self.refuses:
            raise WeightSyncError(f"{what}: out of memory")


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    found = Control([])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.events.append("empty cache"))
    return found


def learner_on(device: str, control: Control) -> Learner:
    given = {"model": {"path": Path("unused")}, "engine": {"sleep": True}}
    models: Any = SimpleNamespace(
        algorithm=None, policy=SimpleNamespace(device=torch.device(device))
    )
    models.together = lambda step: step.on(models)
    learner = Learner(RanksConfig.model_validate(given), models)
    learner._engines = SimpleNamespace(control=control)  # type: ignore[assignment]
    return learner


def test_cache_is_emptied_before_engines_wake_up(control: Control) -> None:
    learner = learner_on("cuda:1", control)
    with learner.engines_asleep():
        control.events.append("train")
    assert control.events == ["sleep", "train", "empty cache", "wake up"]


def test_cache_is_emptied_after_a_step_that_failed_too(control: Control) -> None:
    with (
        pytest.raises(ValueError, match="not finite"),
        learner_on("cuda", control).engines_asleep(),
    ):
        raise ValueError("the gradient is not finite")
    assert control.events == ["sleep", "empty cache", "wake up"]


@pytest.mark.parametrize("what", ["sleep", "wake up"])
def test_refusal_of_a_living_engine_is_an_error(control: Control, what: str) -> None:
    control.refuses = what
    with (
        pytest.raises(WeightSyncError, match=f"{what}: out of memory"),
        learner_on("cuda", control).engines_asleep(),
    ):
        pass


@pytest.mark.parametrize("what", ["sleep", "wake up"])
def test_engine_that_has_ended_is_left_to_its_restart(control: Control, what: str) -> None:
    control.refuses, control.is_dead = what, True
    with learner_on("cuda", control).engines_asleep():
        pass
    assert control.events == ["sleep", "empty cache", "wake up"]


def test_a_cpu_has_no_cache_to_empty(control: Control) -> None:
    learner_on("cpu", control).free_cache()
    assert control.events == []
