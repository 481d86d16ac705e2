"""Architectures that are not in the table of docs/models.md and are trained, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.policy.architectures import Architecture
from tests.trainer.policy.table import reason

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("afmoe", {}),
        ("helium", {}),
        ("hunyuan_v1_moe", {"head_dim": 128, "moe_topk": 8, "num_experts": 64}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_architecture_is_trained(kind: str, changes: dict[str, Any]) -> None:
    """afmoe views the output of attention, and the width of helium is heads times head size.
    Hunyuan's published models set the head size, which its configuration leaves open."""
    assert reason(Architecture(kind, kind, changes=changes)) == ""


def test_size_that_a_configuration_leaves_open_is_named_in_the_refusal() -> None:
    said = reason(Architecture("Hunyuan", "hunyuan_v1_moe"))
    assert "hunyuan_v1_moe models cannot be computed packed" in said
    assert "config.json leaves open head_dim" in said
