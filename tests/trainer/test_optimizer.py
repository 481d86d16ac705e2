"""The optimizer's step on a model of one weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.optimizer import OptimizerConfig, Stepper


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
