"""Numbers of the configuration: finite, and the same default whether a section is given or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from proxy.config import ProxyConfig
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.correction import REJECTIONS, WEIGHTS
from trainer.algorithms.kl import ESTIMATORS
from trainer.algorithms.policy_losses import LOSSES
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.settings.sources import load

REGISTRIES = (ADVANTAGES, AGGREGATIONS, REJECTIONS, WEIGHTS, ESTIMATORS, LOSSES)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models_in(each)


def sections() -> set[type[BaseModel]]:
    """Every model of the two configurations."""
    found: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [TrainerConfig, ProxyConfig]
    waiting += [each for registry in REGISTRIES for each in registry.classes]
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            for field in model.model_fields.values():
                waiting += models_in(field.annotation)
    return found


SECTIONS = sorted(sections(), key=lambda model: model.__name__)


def test_default_of_a_section_is_that_of_its_keys() -> None:
    """Otherwise setting one key of the section would change another."""
    wrong = [
        f"{model.__name__}.{name}"
        for model in SECTIONS
        for name, field in model.model_fields.items()
        if isinstance(
            default := field.get_default(call_default_factory=True, validated_data={}), BaseModel
        )
        if default != type(default)()
    ]
    assert len(SECTIONS) > 60
    assert not wrong


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_may_be_infinite_or_nan(value: float) -> None:
    accepted = []
    for model in SECTIONS:
        for name, field in model.model_fields.items():
            if "float" not in str(field.annotation):
                continue
            kind: Any = field.annotation
            for shape in (value, [value], [value, value], {"a": value}):
                adapter: TypeAdapter[Any] = TypeAdapter(
                    kind, config=model.model_config if not list(models_in(kind)) else None
                )
                try:
                    adapter.validate_python(shape)
                except ValidationError:
                    continue
                accepted.append(f"{model.__name__}.{name}")
    assert not accepted


def loaded(tmp_path: Path, text: str, *words: str) -> TrainerConfig:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}}}\nremote_agent: {{command: {{argv: [a]}}}}\n{text}"
    )
    return load([path], words, {})


@pytest.mark.parametrize("value", [True, False, 2**63, -(10**400)])
def test_no_number_may_be_a_switch_or_need_more_than_64_bits(value: int) -> None:
    accepted, tried = [], 0
    for model in SECTIONS:
        for name, field in model.model_fields.items():
            kinds = str(field.annotation)
            if "bool" in kinds or not ("int" in kinds or "float" in kinds):
                continue
            if "float" in kinds and not isinstance(value, bool):
                continue
            tried += 1
            for shape in (value, [value], [value, value]):
                try:
                    model.__pydantic_validator__.validate_assignment(
                        model.model_construct(), name, shape
                    )
                except ValidationError:
                    continue
                accepted.append(f"{model.__name__}.{name}")
    assert tried > 70
    assert not accepted


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.steps=yes", "should be a number, and not true, false"),
        ("optimizer.lr=true", "should be a number"),
        ("optimizer.betas=[true, 0.9]", "should be a number"),
        ("algorithm.reward.scale=on", "should be a number"),
        ("model.lora={rank: true}", "should be a number"),
        ("remote_agent.timeout_s=1:30", "should be a valid number"),
        (f"trainer.steps={10**400}", "64 bits"),
        (f"rollout.max_tokens={2**63}", "64 bits"),
        (f"trainer.steps={'9' * 5000}", "not YAML"),
    ],
)
def test_number_of_another_kind_is_refused_with_its_key(
    tmp_path: Path, setting: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"{setting[:9]}.*{said}"):
        loaded(tmp_path, "", setting)


@pytest.mark.parametrize("key", ["optimizer.lr", "rollout.temperature", "eval.success_at"])
@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400"])
def test_infinite_value_is_refused_with_its_key(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        loaded(tmp_path, "", f"{key}={value}")


def test_exponent_without_a_point_is_a_number_everywhere(tmp_path: Path) -> None:
    filter_ = "rollout: {filter: {function: 'm:f', settings: {a: 1e-3, b: [2E5, -1e+2]}}}"
    settings = yaml_of(tmp_path, filter_)["rollout"]["filter"]["settings"]
    assert settings == {"a": 0.001, "b": [200000.0, -100.0]}
    text = yaml_of(tmp_path, "a: '1e-3'\nb: 1e-3x\nc: e3\nd: 12e\n")
    assert text == {"a": "1e-3", "b": "1e-3x", "c": "e3", "d": "12e"}


def yaml_of(tmp_path: Path, text: str) -> Any:
    from proxy.settings.yaml_file import read_yaml

    (tmp_path / "a.yaml").write_text(text)
    return read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.min_group_size=9", "rollout.group_size=8"], "rollout.min_group_size=9"),
        (["algorithm.reward.scale=0"], "algorithm.reward.scale"),
        (["algorithm.advantage={name: pass_at_k, k: 8}", "rollout.group_size=8"], "advantage.k"),
        (["algorithm.kl={estimator: k1}"], "algorithm.kl.estimator=k1"),
        (["optimizer.max_grad_norm=1e-30"], "max_grad_norm=1e-30 with eps=1e-08"),
        (["optimizer.lr=1e-10", "optimizer.eps=1e3"], "a step changes no weight"),
    ],
)
def test_settings_that_train_nothing_are_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, "", *words)
    assert said in str(refused.value)
