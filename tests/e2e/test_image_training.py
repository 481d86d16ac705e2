"""A run on a tiny model that reads images, with the agent of examples/images and a real vLLM."""

from __future__ import annotations

import pytest

from tests.e2e.images.program import MARKS, printed
from tests.e2e.test_images import BOUNDS

pytestmark = MARKS


@pytest.mark.parametrize(
    ("kind", "vision", "ranks"),
    [
        ("gemma3", "frozen", "1"),
        ("gemma3", "trained", "1"),
        ("gemma3", "trained", "2"),
        ("qwen3_vl", "trained", "1"),
    ],
)
def test_engine_samples_from_what_was_trained(kind: str, vision: str, ranks: str) -> None:
    """Language model and tower: with the tower of the beginning, the record is another one."""
    found = printed("training", kind, vision, ranks)
    for step in found["steps"]:
        assert (step["rollout/trials"], step["rollout/failed"]) == (8, 0)
        assert step["rollout/turns"] == 2  # a screen in each
        assert step["actor/grad_norm"] > 0
        assert step["mismatch/logp_abs_mean"] < BOUNDS[kind]
    assert found["same names"]
    assert len(found["differences"]) >= 8  # of 16: without those that sampled an image's token
    assert max(found["differences"]) < BOUNDS[kind]
    if vision == "frozen":
        assert found["moved"] == 0
        assert found["first_tower"] == found["differences"]
    else:
        assert found["moved"] > 1e-3
        assert min(found["first_tower"]) > 1e-2
