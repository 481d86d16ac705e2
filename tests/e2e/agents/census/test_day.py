"""A recorded day of one agent: see `day`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.records import RolloutStatus
from agent_loop.trajectory import flatten
from proxy.records import TurnStatus
from tests.e2e.agents.census.day import record_day
from tests.e2e.agents.census.families import FAMILIES, Writer, write_family
from tests.e2e.agents.test_agents import pytestmark as needs_agents
from tests.proxy.conftest import starting_proxies

pytestmark = [*needs_agents, pytest.mark.long]


@pytest.mark.parametrize("name", ["claude_code", "codex"])
async def test_day_is_one_exact_path_per_thread(name: str, tmp_path: Path) -> None:
    family = FAMILIES["qwen3.5"]
    folder = write_family(family, tmp_path / "checkpoint", None)
    writer = Writer(family, folder)
    async with starting_proxies(folder, writer.rendering, tmp_path) as start:
        day = await record_day(name, writer, start, tmp_path)
    assert day.rollout.status is RolloutStatus.DONE, day.rollout.error
    assert {turn.status for turn in day.turns} == {TurnStatus.DONE}
    roles = {each.role for each in day.written}
    assert {"main", "sub-agent", "summary"} <= roles
    assert len(day.turns) >= 120
    assert day.replayed()
    assert day.paths_ratio <= 1.05
    assert day.tokens_ratio <= 1.05
    assert len(flatten(day.rollout.segments)) <= day.paths
