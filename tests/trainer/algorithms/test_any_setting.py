"""Whatever number a setting of the algorithm or of an optimizer is: it is refused, or a step has
finite advantages, losses, gradients and weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tests.trainer.algorithms.test_advantages import batch_of, trial
from tests.trainer.test_config_numbers import loaded
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.part import MAX_FACTOR
from trainer.batch import Batch
from trainer.errors import ConfigError
from trainer.optimizer import Stepper
from trainer.optimizer_config import OptimizerConfig
from trainer.settings.sources import keys_of

TOKENS = 3
BESIDE: dict[str, dict[str, Any]] = {
    "advantage[gae]": {"critic": {}},
    "critic": {"advantage": "gae"},
    "reward.overlong": {"reward": {"overlong": {"max_tokens": 3, "buffer_tokens": 2}}},
    "distillation": {"distillation": {"teacher": "t"}},
    "correction.reject[divergence]": {
        "correction": {"reject": [{"name": "divergence", "upper": 0.4}]}
    },
    "kl.adaptive": {"kl": {"adaptive": {"target": 0.1}}},
}
"""What the keys of a section need besides."""
EDGES = (
    *(1e300, 1e39, 3.4e38, 1e20, 1e10, 1e-10, 1e-20, 1e-38, 1e-45, 1e-46, 1e-300, 5e-324, 0.0),
    *(1 + 1e-7, 2**31, 2**63, 2**64, 10**400, math.inf, math.nan),
)
numbers = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from(EDGES).flatmap(lambda edge: st.sampled_from([edge, -edge])),
    st.floats().map(str),
    st.text(max_size=5),
)


def number_keys(section: type[BaseModel]) -> list[str]:
    return [
        key.path
        for key in keys_of(section)
        if not key.is_section and re.search(r"\b(float|int)\b", str(key.field.annotation))
    ]


def with_key(path: str, value: object) -> dict[str, Any]:
    """The section that sets this key, and what it needs besides."""
    own: Any = [value, value] if path.endswith("betas") else value
    for word in reversed(path.split(".")):
        name, _, part = word.rstrip("]").partition("[")
        section = {"name": part} | own if part else own
        own = {name: [section] if name == "reject" else section}
    settings: dict[str, Any] = {}
    for prefix, needed in BESIDE.items():
        if path.startswith(prefix):
            settings = merged(settings, needed)
    return merged(settings, own)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for key, value in second.items():
        match both.get(key), value:
            case dict() as old, dict():
                both[key] = merged(old, value)
            case [old], [new]:
                both[key] = [merged(old, new)]
            case _:
                both[key] = value
    return both


def is_finite(*tensors: torch.Tensor | None) -> bool:
    return all(each is None or bool(torch.isfinite(each).all()) for each in tensors)


def random_batch(config: AlgorithmConfig) -> Batch:
    """A group of four rollouts, whose policy, reference and critic differ a little."""
    rewards = {"a": 1.0, "b": 0.0, "c": 0.5, "d": -2.0}
    batch = batch_of([trial(name, r, 1, tokens=TOKENS) for name, r in rewards.items()])
    generator = torch.Generator().manual_seed(1)

    def noise() -> torch.Tensor:
        return torch.randn(batch.num_tokens, generator=generator)

    batch.logprobs = -noise().abs()
    batch.prox_logprobs = batch.logprobs + 0.3 * noise()
    batch.ref_logprobs = batch.teacher_logprobs = batch.logprobs + noise()
    if config.critic is not None:
        batch.values = noise()
    return batch


def check_update(config: AlgorithmConfig) -> None:
    batch, algorithm = random_batch(config), Algorithm(config)
    algorithm.compute_advantages(batch)
    assert is_finite(batch.advantages, batch.value_targets)
    assert batch.prox_logprobs is not None
    next(algorithm.mini_batches(batch, torch.Generator()))
    tokens = torch.arange(batch.num_tokens)
    logprobs = (batch.prox_logprobs + 0.1).requires_grad_()
    entropy = torch.full((batch.num_tokens,), 11.0).requires_grad_()  # of 60,000 equal tokens
    result = algorithm.loss(batch)(logprobs, entropy, tokens)
    assert is_finite(result.losses, *map(torch.as_tensor, result.metrics.values()))
    result.losses.sum().backward()
    for gradient in (logprobs.grad, entropy.grad):
        assert gradient is None or float(gradient.abs().max()) < 1e15  # its square is finite
    if config.critic is not None:
        assert batch.values is not None
        values = batch.values.clone().requires_grad_()
        value_loss = algorithm.value_loss(batch)(values, tokens)
        value_loss.losses.sum().backward()
        assert is_finite(value_loss.losses, values.grad)
        check_step(config.critic.optimizer)
    for _ in range(2000):
        algorithm.adapt_kl(1e3)
    assert algorithm.kl_coefficient <= MAX_FACTOR


def check_step(config: OptimizerConfig) -> None:
    """Of weights of which one has no gradient, as the embedding of a token that no prompt has."""
    model = torch.nn.Linear(3, 2)
    stepper = Stepper(model, config, total_steps=10)
    for _ in range(3):
        model.weight.grad = torch.tensor([[0.0, 1e-20, 1.0], [1e3, -1.0, 0.0]])
        stepper.step()
    assert is_finite(*model.parameters())


@pytest.mark.parametrize("path", number_keys(AlgorithmConfig))
@given(value=numbers)
@settings(max_examples=60, deadline=None)
def test_any_number_of_the_algorithm_is_refused_or_computed_with(path: str, value: object) -> None:
    try:
        config = AlgorithmConfig.model_validate(with_key(path, value))
    except ValidationError:
        return
    check_update(config)


@pytest.mark.parametrize("path", number_keys(OptimizerConfig))
@given(value=numbers)
@settings(max_examples=60, deadline=None)
def test_any_number_of_the_optimizer_is_refused_or_steps_to_finite_weights(
    path: str, value: object
) -> None:
    try:
        config = OptimizerConfig.model_validate(with_key(path, value))
    except ValidationError:
        return
    check_step(config)


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("rollout.temperature", "0.009", "0.01"),  # vLLM samples at 0.01 for less
        ("optimizer.lr", "1e-13", "1e-12"),  # float32 weights would not change
        ("trainer.seed", "-1", "0"),
        ("trainer.seed", str(2**31), str(2**31 - 1)),
        ("model.lora.alpha", "1e39", "1e3"),
        ("model.router_aux_loss", "1e39", "1e3"),
    ],
)
def test_numbers_that_other_programs_or_float32_do_not_hold_are_refused(
    tmp_path: Path, key: str, refused: str, accepted: str
) -> None:
    assert loaded(tmp_path, "", f"{key}={accepted}")
    with pytest.raises(ConfigError, match=key):
        loaded(tmp_path, "", f"{key}={refused}")
