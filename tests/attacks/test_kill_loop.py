"""Short kill loops; a long one is `python -m tests.attacks.kill_loop --kills 1000`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attacks.kill_loop import AGENTS, kill_loop
from tests.needs import needs
from tests.postgres_server import binaries

NO_POSTGRES = None if binaries() else "PostgreSQL is not installed: apt-get install postgresql"


@pytest.mark.parametrize("seed", [random.randrange(10**6)], ids=["random-seed"])
@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(("proxy", "engine"), id="proxy-engine"),
        pytest.param(("postgres",), id="postgres", marks=needs(NO_POSTGRES)),
        pytest.param(("poison", "engine"), id="poison-engine"),
    ],
)
async def test_every_answer_is_recorded_once_whatever_is_killed(
    tmp_path: Path, targets: tuple[str, ...], seed: int
) -> None:
    report = await kill_loop(tmp_path, targets, kills=3, seed=seed)
    assert not report.broken, f"seed {seed}: {report.summary()}: {report.broken}"


async def test_no_agent_sees_an_error_when_only_the_engine_is_killed(tmp_path: Path) -> None:
    # Each call that a kill has ended gets its first token before the next one: nothing tells a call
    # that was about to begin alone in two kills from one that kills engines.
    report = await kill_loop(tmp_path, ("engine",), kills=3, seed=7, least=2 * AGENTS)
    assert not report.broken
    assert report.failed_calls == 0
