"""A short fuzz run with the same requests each time; `make fuzz-http` draws new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.fuzz_http import fuzz
from tests.attacks.victim import running_victim

REQUESTS = 800


@pytest.mark.parametrize(("workers", "seed"), [(1, 71), (2, 72)])
async def test_hostile_requests_cause_no_500_no_traceback_and_no_open_turn(
    tmp_path: Path, workers: int, seed: int
) -> None:
    async with running_victim(tmp_path, workers=workers) as victim:
        report = await fuzz(victim, REQUESTS // workers, seed)
    assert not report.broken, report.summary()
    assert not report.unanswered, report.summary()
