"""Every architecture of docs/models.md: computed exactly, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.table import PAGE, reason
from trainer.policy.architecture import without_noise
from trainer.policy.proof_on_copy import find_difference_of_pieces
from trainer.policy.shrink import shrunk


@pytest.fixture(autouse=True)
def nothing_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.title)
def test_architecture_is_equal_to_its_own_code_or_refused(architecture: Architecture) -> None:
    said = reason(architecture)
    if architecture.refused:
        assert re.search(architecture.refused, said), said
    else:
        assert said == ""


def test_page_lists_every_architecture() -> None:
    listed = re.findall(r"^\| ([^|]+) \| (?:`|none)", PAGE.read_text(), re.M)
    assert listed == [
        each.title
        for refused in (False, True)
        for each in ARCHITECTURES
        if bool(each.refused) == refused
    ]


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if not a.refused], ids=lambda each: each.title
)
def test_trees_of_every_architecture_are_computed_in_pieces(architecture: Architecture) -> None:
    small = shrunk(without_noise(architecture.settings()))
    assert find_difference_of_pieces(small) is None
