"""Images through the proxy to a real vLLM on a CPU, compared with what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.images.program import MARKS, printed
from tests.e2e.test_images import BOUNDS, OTHER_IMAGE

LARGEST = {"qwen3_vl": 1e-4, "gemma3": 1e-4, "qwen3_5": 0.3}
"""Of a token: float32, and bfloat16, in which prefill and decode differ by more."""
KINDS = ("qwen3_vl", "qwen3_5", "gemma3")
pytestmark = [*MARKS, pytest.mark.parametrize("kind", KINDS)]


def found(kind: str) -> dict[str, Any]:
    return printed("recorded", kind)


def test_recorded_log_probabilities_are_those_of_the_recorded_images(kind: str) -> None:
    """In three dialects, over several turns, and at an engine that has had none of the images."""
    for name, each in found(kind)["differences"].items():
        assert max(each) < BOUNDS[kind], (name, each)
    assert min(found(kind)["swapped"]) > OTHER_IMAGE / 2


def test_prompts_extend_and_name_each_new_image_once(kind: str) -> None:
    assert found(kind)["forks"] == []
    assert found(kind)["images"] == {
        "chat": [["small"], ["wide", "twin"], ["small"]],
        "messages": [["tall"]],
        "responses": [["small"], []],
    }


def test_digest_is_that_of_the_checkpoints_own_processor(kind: str) -> None:
    assert found(kind)["digests"]


def test_branch_is_given_its_recorded_turns_and_goes_on_with_another_image(kind: str) -> None:
    assert found(kind)["branch"] == ["context", "context", "done"]
    assert found(kind)["branch_answers"]
    assert max(found(kind)["branch_differences"]) < BOUNDS[kind]


def test_replay_with_images_returns_the_recorded_log_probabilities(kind: str) -> None:
    """At an engine that has had some of them."""
    replayed = found(kind)["replayed"]
    assert [len(replayed[name]) for name in ("chat", "messages", "responses", "branch")] == [
        *(3, 1, 2, 1)
    ]
    assert max(max(each) for each in replayed.values()) < LARGEST[kind]
