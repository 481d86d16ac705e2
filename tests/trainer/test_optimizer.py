"""The optimizer's step on a model of one weight."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.optimizer import Stepper
from trainer.optimizer_config import OptimizerConfig


def moved(gradient: float, **settings: float) -> tuple[dict[str, float], float]:
    """The metrics of one step on a weight with this gradient, and how far the weight moved."""
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    # With a large epsilon the first step of Adam is proportional to the gradient.
    config = OptimizerConfig.model_validate({"lr": 1e3, "eps": 1e3} | settings)
    stepper = Stepper(model, config, total_steps=None)
    model.weight.grad = torch.full_like(model.weight, gradient)
    return stepper.step(), before - model.weight.item()


def test_gradients_above_max_grad_norm_are_scaled_down_to_it() -> None:
    small, _ = moved(0.5, max_grad_norm=0.5)
    metrics, far = moved(8.0, max_grad_norm=0.5)
    assert (small["grad_norm"], metrics["grad_norm"]) == (0.5, 8.0)
    assert far == pytest.approx(moved(0.5, max_grad_norm=0.5)[1], rel=1e-3)
    assert moved(8.0, max_grad_norm=100.0)[1] == pytest.approx(16 * far, rel=2e-2)


def stepper_of(**settings: float) -> Stepper:
    """That of a weight of 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return Stepper(model, OptimizerConfig.model_validate(settings), total_steps=None)


def stepped(stepper: Stepper) -> float:
    """The weight after a step with a gradient of 1."""
    (weight,) = stepper.model.parameters()
    weight.grad = torch.ones_like(weight)
    stepper.step()
    return weight.item()


class Counted(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_adamw_is_one_operation_for_all_weights_with_the_same_decay() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    stepper = Stepper(model, OptimizerConfig(lr=1e-3), None)
    model(torch.ones(1, 4)).sum().backward()
    with Counted() as counted:
        stepper.step()
    assert counted.calls["_fused_adamw_"] == 2  # matrices and vectors
    assert not any(name.startswith("_foreach_addc") for name in counted.calls)


def test_checkpoint_before_the_first_step_does_not_change_that_step() -> None:
    saved, alone = stepper_of(lr=0.1), stepper_of(lr=0.1)
    state = copy.deepcopy(saved.state_dict())
    restored = stepper_of(lr=0.1)
    restored.load_state_dict(state)
    assert stepped(alone) == pytest.approx(0.9)
    assert stepped(restored) == stepped(saved) == pytest.approx(0.9)


def test_continued_training_has_the_settings_of_its_own_configuration() -> None:
    first = stepper_of(lr=0.1)
    stepped(first)
    second = stepper_of(lr=0.001, weight_decay=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    (group,) = second.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.001, 0.5)
    second.schedule.step()
    assert group["lr"] == 0.001


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (2, 10), (0, 2), (8, 10)])
def test_learning_rate_is_the_peak_after_the_warmup_and_min_lr_ratio_at_the_last_step(
    schedule: str, warmup: int, steps: int
) -> None:
    settings = {"lr": 2.0, "schedule": schedule, "warmup_steps": warmup, "min_lr_ratio": 0.1}
    model = nn.Linear(1, 1, bias=False)
    stepper = Stepper(model, OptimizerConfig.model_validate(settings), steps)
    rates = []
    for _ in range(steps):
        rates.append(stepper.optimizer.param_groups[0]["lr"])
        model.weight.grad = torch.ones_like(model.weight)
        stepper.step()
    assert max(rates) == rates[warmup] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    moments = copy.deepcopy(stepper.optimizer.state_dict()["state"])
    stepper.begin_schedule()
    again = []
    for _ in range(steps):
        again.append(stepper.optimizer.param_groups[0]["lr"])
        stepper.schedule.step()
    assert again == rates
    assert stepper.optimizer.state_dict()["state"] == moments
