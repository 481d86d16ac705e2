"""Policy losses and their gradients compared with float64 NumPy, token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithms.correction import SecondMoment
from trainer.algorithms.policy_losses import (
    Cispo,
    Gspo,
    Loss,
    Ppo,
    Reinforce,
    Sapo,
    log_linear_prox,
)

Array = NDArray[np.float64]
Oracle = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""(logprobs, prox, advantages, sequence) → (losses, gradient of their sum)."""


def ppo_oracle(low: float, high: float, dual: float | None = None) -> Oracle:
    def oracle(logp: Array, prox: Array, adv: Array, _seq: Array) -> tuple[Array, Array]:
        loss, grad = np.zeros_like(logp), np.zeros_like(logp)
        for t in range(len(logp)):
            r, a = np.exp(logp[t] - prox[t]), adv[t]
            clipped = min(max(r, 1 - low), 1 + high)
            loss[t] = -min(r * a, clipped * a)
            grad[t] = -r * a if r * a <= clipped * a else 0.0
            if dual is not None and a < 0 and loss[t] > dual * abs(a):
                loss[t], grad[t] = dual * abs(a), 0.0
        return loss, grad

    return oracle


def gspo_oracle(low: float, high: float) -> Oracle:
    def oracle(logp: Array, prox: Array, adv: Array, seq: Array) -> tuple[Array, Array]:
        loss, grad = np.zeros_like(logp), np.zeros_like(logp)
        for t in range(len(logp)):
            own = seq == seq[t]
            r, a = np.exp(np.mean((logp - prox)[own])), adv[t]
            clipped = min(max(r, 1 - low), 1 + high)
            loss[t] = -min(r * a, clipped * a)
            grad[t] = -r * a if r * a <= clipped * a else 0.0
        return loss, grad

    return oracle


def cispo_oracle(low: float, high: float) -> Oracle:
    def oracle(logp: Array, prox: Array, adv: Array, _seq: Array) -> tuple[Array, Array]:
        bounded = np.clip(np.exp(logp - prox), 1 - low, 1 + high)
        return -bounded * adv * logp, -bounded * adv

    return oracle


def sapo_oracle(positive: float, negative: float) -> Oracle:
    def oracle(logp: Array, prox: Array, adv: Array, _seq: Array) -> tuple[Array, Array]:
        r = np.exp(logp - prox)
        tau = np.where(adv > 0, positive, negative)
        gate = 1 / (1 + np.exp(-tau * (r - 1)))
        return -4 / tau * gate * adv, -4 * gate * (1 - gate) * r * adv

    return oracle


def reinforce_oracle(logp: Array, _prox: Array, adv: Array, _seq: Array) -> tuple[Array, Array]:
    return -adv * logp, -adv


CASES: dict[str, tuple[Loss, Oracle]] = {
    "ppo": (
        Ppo(clip_low=0.2, clip_high=0.28),
        ppo_oracle(0.2, 0.28),
    ),
    "dual_clip": (
        Ppo(clip_low=0.2, clip_high=0.2, dual_clip=1.5),
        ppo_oracle(0.2, 0.2, 1.5),
    ),
    "gspo": (
        Gspo(clip_low=0.05, clip_high=0.1),
        gspo_oracle(0.05, 0.1),
    ),
    "cispo": (
        Cispo(clip_low=0.3, clip_high=0.2),
        cispo_oracle(0.3, 0.2),
    ),
    "sapo": (
        Sapo(tau_positive=1.0, tau_negative=1.3),
        sapo_oracle(1.0, 1.3),
    ),
    "reinforce": (Reinforce(), reinforce_oracle),
}


def columns(seed: int) -> tuple[Array, Array, Array, Array]:
    """Random tokens of a few sequences, including the edge cases r = 1 and A = 0."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 30))
    prox = -rng.random(size) * 4
    logp = prox + rng.normal(0, 0.4, size)
    adv = rng.normal(0, 2, size)
    same = rng.random(size) < 0.1
    logp[same] = prox[same]
    adv[rng.random(size) < 0.1] = 0.0
    return logp, prox, adv, np.sort(rng.integers(0, 5, size))


def tensors(*arrays: Array) -> list[Tensor]:
    return [torch.as_tensor(array) for array in arrays]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_loss_and_gradient_match_numpy(name: str, seed: int) -> None:
    loss, oracle = CASES[name]
    arrays = columns(seed)
    logp, prox, adv, seq = tensors(*arrays)
    logp.requires_grad_()
    result = loss.losses(logp, prox, adv, seq)
    result.losses.sum().backward()
    expected, gradient = oracle(*arrays)
    np.testing.assert_allclose(result.losses.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), gradient, atol=1e-12)


def test_losses_of_extreme_ratios_are_finite() -> None:
    logp, prox, adv = torch.zeros(2), torch.tensor([-500.0, 500.0]), torch.tensor([-1.0, 1.0])
    for name, (loss, _) in CASES.items():
        assert torch.isfinite(loss.losses(logp, prox, adv, torch.tensor([0, 1])).losses).all(), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), threshold=st.floats(1e-4, 0.5))
def test_second_moment_drops_the_largest_until_the_mean_is_below_the_threshold(
    seed: int, threshold: float
) -> None:
    behaviour, prox, _, _ = columns(seed)
    squares = (behaviour - prox) ** 2
    kept = np.ones(len(squares), bool)
    while kept.any() and squares[kept].mean() >= threshold:
        kept[np.flatnonzero(kept)[np.argmax(squares[kept])]] = False
    log_w, sequence = tensors(prox - behaviour, np.zeros(len(prox)))
    got = SecondMoment(threshold=threshold).keeps(log_w, sequence)
    assert (got.numpy() == kept).all()


def test_log_linear_prox_moves_toward_the_policy_with_staleness() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    logp = torch.tensor([-2.0, -2.0, -2.0, -2.0], requires_grad=True)
    versions = torch.tensor([7, 6, 5, 4])
    prox = log_linear_prox(logp, behaviour, versions, version=7)
    torch.testing.assert_close(prox, torch.tensor([-1.0, -1 - 1 / 2, -1 - 2 / 3, -1 - 3 / 4]))
    assert not prox.requires_grad
