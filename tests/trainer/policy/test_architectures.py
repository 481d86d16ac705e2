"""Every architecture of docs/models.md: computed exactly, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.float64 import in_float64
from tests.trainer.policy.table import PAGE, proven, reason
from trainer.policy.architecture import without_noise
from trainer.policy.proof_on_copy import distances
from trainer.policy.shrink import shrunk

TRAINED = [each for each in ARCHITECTURES if not each.refused]
FLOAT32_ROUTERS = ("Qwen 3 MoE", "Qwen3-Next", "Qwen 3.5 MoE")
"""Their code names the type of the router's softmax in a way that `in_float64` leaves alone."""
LONG = ("Kimi-Linear", "Gemma 3n")
"""Refused because a layer differs, which `test_architecture.py` shows of phimoe in a fraction of a
second; their proofs take 13 s and 22 s of processor time."""


@pytest.fixture(autouse=True)
def nothing_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=pytest.mark.long if each.title in LONG else (), id=each.title)
        for each in ARCHITECTURES
    ],
)
def test_architecture_is_equal_to_its_own_code_or_refused(architecture: Architecture) -> None:
    """Packed, as a tree, and as a tree in pieces."""
    if architecture.refused:
        said = reason(architecture)
        assert re.search(architecture.refused, said), said
    else:
        assert proven(architecture) == ""


def test_page_lists_every_architecture() -> None:
    listed = re.findall(r"^\| ([^|]+) \| (?:`|none)", PAGE.read_text(), re.M)
    assert listed == [
        each.title
        for refused in (False, True)
        for each in ARCHITECTURES
        if bool(each.refused) == refused
    ]


@pytest.mark.parametrize("architecture", TRAINED, ids=lambda each: each.title)
def test_rows_trees_and_pieces_are_exact_where_nothing_is_rounded(
    architecture: Architecture,
) -> None:
    """In float32, the model's own code is 1e-5 from the truth, so that the bound of the proof is
    above that."""
    with in_float64():
        found = distances(shrunk(without_noise(architecture.settings())))
    assert max(found.logprobs, found.gradients) < (
        1e-6 if architecture.title in FLOAT32_ROUTERS else 1e-11
    )
