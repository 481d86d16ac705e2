"""Models that ranks cannot divide are refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from trainer.errors import ConfigError
from trainer.policy.parallelism import Parallelism, check_divided


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)


def check(kind: str, divided: Parallelism, **settings: Any) -> None:
    check_divided(CONFIG_MAPPING[kind](**settings), divided, "model.path", Path("folder"))


@pytest.mark.parametrize(
    ("kind", "divided", "settings", "message"),
    [
        (
            "qwen3_next",
            Parallelism(tensor=2),
            {},
            "trainer.tensor_parallel is not supported for qwen3_next models, only for llama, "
            "mistral, qwen2, qwen3; use trainer.tensor_parallel=1",
        ),
        ("qwen3", Parallelism(expert=2), {}, "trainer.expert_parallel is not supported for qwen3"),
        ("gemma2", Parallelism(pipeline=2), {}, "trainer.pipeline_parallel is not supported for"),
        (
            "qwen3",
            Parallelism(pipeline=2),
            {"tie_word_embeddings": True},
            "is not supported for tied embeddings, which the first and the last stage would share",
        ),
        (
            "qwen3",
            Parallelism(tensor=4),
            {"num_key_value_heads": 2},
            "trainer.tensor_parallel=4 does not divide its num_key_value_heads of 2",
        ),
        ("qwen3_moe", Parallelism(expert=3), {}, "does not divide its num_experts of 128"),
        (
            "qwen3",
            Parallelism(pipeline=4),
            {"num_hidden_layers": 3},
            "trainer.pipeline_parallel=4 is more than its 3 layers",
        ),
    ],
)
def test_model_that_ranks_cannot_divide_is_refused(
    kind: str, divided: Parallelism, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: folder: ") as refused:
        check(kind, divided, **settings)
    assert message in str(refused.value)


def test_models_that_ranks_can_divide_are_accepted() -> None:
    check("qwen3", Parallelism(tensor=2, pipeline=2))
    check("qwen3_moe", Parallelism(pipeline=2, expert=2))
    check("gemma2", Parallelism(context=2))


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    check("gemma2", Parallelism(context=2))
    with pytest.raises(ConfigError, match=r"uv pip install --no-deps nemo-automodel==0\.7\.0"):
        check("qwen3", Parallelism(tensor=2))
