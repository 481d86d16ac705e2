"""Every architecture of docs/models.md: computed exactly, or refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.table import PAGE, reason


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
