"""What docs/notes/images.md says of a real vLLM on a CPU and models that read images."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.images.program import MARKS, printed

KINDS = ("qwen3_vl", "qwen3_5", "gemma3")
BOUNDS = {"qwen3_vl": 1e-5, "gemma3": 1e-5, "qwen3_5": 0.03}
"""Mean |Δ log p|: in float32, and in bfloat16, where text alone has 0.015."""
OTHER_IMAGE = 0.1
"""With one of the images changed it is more than this."""
TOWERS = ("model.visual.", "vision_tower.", "multi_modal_projector.")
"""How the names of their weights begin."""
pytestmark = [*MARKS, pytest.mark.parametrize("kind", KINDS)]


def found(kind: str) -> dict[str, Any]:
    return printed("compare", kind)


def test_renderers_make_the_engines_ids_without_pixels(kind: str) -> None:
    """A next turn has the spans of earlier images only if it is given them."""
    if kind == "gemma3":
        assert found(kind)["rendering"] is None
        return
    assert found(kind)["rendering"] == {
        "ids are the engine's": True,
        "spans are the engine's": True,
        "next turn extends": True,
        "next turn has all spans": True,
        "also without the earlier ones": False,
    }


def test_engine_computes_what_transformers_computes(kind: str) -> None:
    """Also Gemma 3's images, which vLLM's own attention on a CPU computes causally."""
    logprobs, bound = found(kind)["logprobs"], BOUNDS[kind]
    assert logprobs["text alone"] < bound
    assert logprobs["same"] < bound
    assert logprobs["first changed"] > OTHER_IMAGE
    assert logprobs["last changed"] > OTHER_IMAGE
    if kind == "gemma3":
        assert logprobs["causal"] > OTHER_IMAGE


def test_engines_pixels_are_those_of_the_models_own_processor(kind: str) -> None:
    pixels = found(kind)["pixels"]
    assert all("upright, on white" in ways for ways in pixels.values())
    assert {name for name in pixels if "RGB" not in pixels[name]} == {"alpha", "turned JPEG"}
    assert found(kind)["same digests"] == list(pixels)


def test_prefix_is_cached_for_the_same_image_alone(kind: str) -> None:
    uses = found(kind)["cache"]
    assert [(name, cached > 0) for name, cached, _ in uses] == [
        ("one", False),
        ("one", True),
        ("two", False),
        ("two", True),
        ("one", True),
    ]
    one, again, two, again_two, last = [logprobs for _, _, logprobs in uses]
    assert again == last == pytest.approx(one, abs=1e-4)
    assert again_two == pytest.approx(two, abs=1e-4)
    assert two != pytest.approx(one, abs=1e-3)


def test_prompts_extend_and_known_images_are_only_named(kind: str) -> None:
    turns = found(kind)["turns"]
    # In bfloat16, Gated DeltaNet computes a prompt otherwise than an answer.
    assert turns["rest of an answer is the same"] or kind == "qwen3_5"
    assert turns["second turn"] < BOUNDS[kind]
    assert turns["second turn, other image"] > OTHER_IMAGE


def test_image_tokens_outside_of_spans_are_text(kind: str) -> None:
    difference = found(kind)["image tokens as text"]
    if kind == "gemma3":
        assert difference is None
    else:
        assert difference < BOUNDS[kind]


def test_content_parts_need_one_token_for_each_image(kind: str) -> None:
    """For Gemma 3, the engine also adds the markers and line breaks around it."""
    parts = found(kind)["content_parts"]
    same = "different" if kind == "gemma3" else "same"
    assert parts == {
        "with data": same,
        "by its name": same,
        "by an unknown name": 400,
        "expanded ids": "more ids",
    }


def test_engine_does_not_notice_wrong_features(kind: str) -> None:
    assert found(kind)["faults"] == {
        "no features": "as neither",
        "hash of one, pixels of two": "as one",
        "new hash, pixels of two": "as two",
        "one token too late": "as neither",
        "one token too few": "as neither",
        "unknown hash without pixels": "500",
        "one token too many": "500, engine ended",
    }


def test_each_weight_of_model_and_tower_arrives_or_the_update_fails(kind: str) -> None:
    """vLLM has then what it has after a fresh load of the same weights, bit for bit."""
    tower = printed("tower", kind)
    assert sum(name.startswith(TOWERS) for name in tower["kinds"]) >= 20
    assert tower["wrong"] == []
    assert tower["accepted"] == []
