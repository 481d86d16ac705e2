"""The kinds of task sources: exactly one in each source. Also those of
`agent_loop.extras.harbor` and `agent_loop.extras.environments`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agent_loop.task_sources.registry import AnyTaskSource
from agent_loop.tasks import DataConfig

KINDS: dict[str, Any] = {
    "dataset": {"path": "hf://owner/name", "name": "main", "split": "test"},
    "harbor": {"dataset": "org/bench@2.0", "registry": "r.json", "folder": "f", "program": "h"},
    "verifiers": {"env": "gsm8k-v1", "python": "p", "path": [], "harness": "null", "settings": {}},
    "resets": {"skip": 4, "take": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_source_of_each_kind_is_both_for_training_and_held_out(kind: str) -> None:
    sources = {"a": {kind: KINDS[kind]}}
    data = DataConfig.model_validate({"train_sources": sources, "val_sources": sources})
    assert data.train_sources["a"] == data.val_sources["a"]
    assert getattr(data.train_sources["a"], kind) is not None


def test_source_without_a_kind_or_with_two_is_refused() -> None:
    expected = r"exactly one of the keys function, dataset, .* 'resets'"
    two = {"resets": {}, "dataset": {"path": "hf://owner/name"}}
    with pytest.raises(ValidationError, match=expected):
        AnyTaskSource.model_validate(two)


@pytest.mark.parametrize("name", ["../x", "a b", "--export", "a@"])
def test_name_of_a_harbor_dataset_is_checked(name: str) -> None:
    with pytest.raises(ValidationError, match="dataset"):
        AnyTaskSource.model_validate({"harbor": {"dataset": name}})
