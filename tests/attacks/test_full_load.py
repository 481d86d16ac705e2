"""`/health` of busy servers; more calls: `python -m tests.attacks.full_load --calls 4096`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.full_load import BOUND_S, SERVERS, full_load


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
async def test_health_is_answered_soon_while_the_server_has_as_much_to_do_as_it_can(
    tmp_path: Path, server: str
) -> None:
    answers, statuses = await full_load(tmp_path, server, calls=256)
    assert statuses.total() % 256 == 0
    assert set(statuses) <= {200, 201, 400, 409, 429}, statuses
    assert answers.worst_s < BOUND_S, answers
