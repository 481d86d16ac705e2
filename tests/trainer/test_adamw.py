"""AdamW of one weight at a time: torch's own update, with moments on the host or with rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from trainer import optimizer as adamw
from trainer.optimizer import OneByOneAdamW, Stepper, rounded
from trainer.optimizer_config import OptimizerConfig
from trainer.run.state_folder import read_state, write_state

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5)).to(dtype)


def learn(trained: nn.Module, stepper: Stepper, seeds: range) -> list[Tensor]:
    dtype = next(trained.parameters()).dtype
    for seed in seeds:
        rows = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)
        trained(rows).square().sum().backward()
        stepper.step()
    return [weight.detach().clone() for weight in trained.parameters()]


def test_moments_on_the_host_change_no_bit() -> None:
    found = []
    for offload in (False, True):
        trained = model()
        stepper = Stepper(trained, CONFIG.model_copy(update={"offload": offload}), None)
        assert isinstance(stepper.optimizer, OneByOneAdamW if offload else AdamW)
        found.append(learn(trained, stepper, range(20)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [1 + 2**-10, -0.3, 3e-5])
def test_rounding_is_to_a_neighbour_and_right_on_average(value: float) -> None:
    exact = torch.full((100_000,), value)
    got = rounded(exact.clone(), torch.Generator().manual_seed(0)).float()
    below, above = sorted(got.unique().tolist())
    assert below < exact[0] < above
    assert above - below <= 2**-7 * abs(value)
    assert abs(float(got.double().mean() - exact[0])) < 0.02 * (above - below)


def test_a_value_in_bfloat16_is_not_changed_by_rounding() -> None:
    exact = torch.randn(10_000).bfloat16()
    assert torch.equal(rounded(exact.float(), torch.Generator().manual_seed(0)), exact)


def test_steps_that_are_smaller_than_the_last_bit_are_not_lost() -> None:
    """400 steps of 1e-5 on weights of 1, whose last bit is 2⁻⁸."""
    weight = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    optimizer = OneByOneAdamW([{"params": [weight]}], lr=1e-5, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(400):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 400e-5, abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    config = CONFIG.model_copy(update={"offload": True})
    trained = model(dtype)
    stepper = Stepper(trained, config, None)
    learn(trained, stepper, range(5))
    state = copy.deepcopy(stepper.state_dict())
    expected = learn(trained, stepper, range(5, 10))

    again = model(dtype)
    other = Stepper(again, config, None)
    other.load_state_dict(state)
    moments = {
        each[name].dtype for each in other.optimizer.state.values() for name in adamw.MOMENTS
    }
    assert moments == {torch.float32}
    for one, two in zip(learn(again, other, range(5, 10)), expected, strict=True):
        assert torch.equal(one, two)


def test_state_of_torchs_optimizer_is_continued_on_the_host() -> None:
    """A run can be continued with `optimizer.offload`."""
    trained = model()
    stepper = Stepper(trained, CONFIG, None)
    learn(trained, stepper, range(5))
    state = copy.deepcopy(stepper.state_dict())
    expected = learn(trained, stepper, range(5, 10))

    again = model()
    other = Stepper(again, CONFIG.model_copy(update={"offload": True}), None)
    other.load_state_dict(state)
    for one, two in zip(learn(again, other, range(5, 10)), expected, strict=True):
        assert torch.equal(one, two)


def test_loaded_moments_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` stands for a GPU."""
    monkeypatch.setattr(adamw, "_pinned", torch.clone, raising=False)
    weight = nn.Parameter(torch.empty(4, device="meta"))
    optimizer = OneByOneAdamW(
        [{"params": [weight]}], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, on_host=True
    )
    moments = {name: torch.full((4,), 0.5) for name in adamw.MOMENTS}
    groups = optimizer.state_dict()["param_groups"]
    state = {0: {"step": torch.tensor(3.0), **moments}}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, saved in {**moments, "step": torch.tensor(3.0)}.items():
        loaded = optimizer.state[weight][name]
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, saved)


@pytest.mark.parametrize("before", [False, True])
def test_checkpoint_is_continued_bit_for_bit_with_and_without_offload(
    tmp_path: Path, before: bool
) -> None:
    trained = model()
    stepper = Stepper(trained, CONFIG.model_copy(update={"offload": before}), None)
    learn(trained, stepper, range(5))
    write_state(stepper.state_dict(), tmp_path)
    expected = learn(trained, stepper, range(5, 10))

    again = model()
    other = Stepper(again, CONFIG.model_copy(update={"offload": not before}), None)
    state = other.state_dict()
    read_state(state, tmp_path)
    other.load_state_dict(state)
    assert other.optimizer.param_groups[0]["fused"]
    for one, two in zip(learn(again, other, range(5, 10)), expected, strict=True):
        assert torch.equal(one, two)
