"""What the server keeps in memory is bounded; `python -m benchmarks.swarm_memory` measures it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from agent_loop.extras.swarm import SwarmError, swarm
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.episodes import SPARE_DEADLINES
from agent_loop.extras.swarm.wire import MAX_REPORT_BYTES
from tests.agent_loop.extras.swarm.conftest import StartSwarm


async def test_ended_episodes_leave_memory_before_their_lifetime_is_over(
    start_swarm: StartSwarm,
) -> None:
    running = await start_swarm(max_life_s=3600.0, lease_s=3600.0)
    gc.collect()
    before = _episodes()
    for number in range(2 * SPARE_DEADLINES):
        episode = await running.client.begin_episode(task_id=f"t{number}", timeout_s=5)
        await running.client.abort_episode(episode)
    gc.collect()
    assert _episodes() - before <= SPARE_DEADLINES


async def test_deadlines_are_kept_for_the_open_episodes(start_swarm: StartSwarm) -> None:
    running = await start_swarm(max_life_s=3600.0, lease_s=3600.0, max_open=4 * SPARE_DEADLINES)
    claimed = [
        await running.client.begin_episode(task_id=f"t{number}", timeout_s=5)
        for number in range(2 * SPARE_DEADLINES)
    ]
    for episode in claimed[1:]:
        await running.client.abort_episode(episode)
    running.expire(claimed[0])
    status = await running.swarm.status()
    while status.open_episodes:
        status = await running.swarm.status(since=status.change, wait_s=10.0)
    assert status.counts["expired"] == 1


async def test_clients_that_are_remembered_are_bounded(
    start_swarm: StartSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "MAX_CLIENTS", 3)
    running = await start_swarm(stop_rule="all_clients")
    for name in "abcde":
        running.swarm.agree(name)
    status = await running.swarm.status()
    assert status.clients == status.agreed == ["c", "d", "e"]


@pytest.mark.parametrize("field", ["metadata", "reward_parts"])
async def test_what_an_end_reports_is_bounded(start_swarm: StartSwarm, field: str) -> None:
    running = await start_swarm()
    episode = await running.client.begin_episode(task_id="t", timeout_s=5)
    assert await running.call(episode) == 200
    large: dict[str, Any] = {field: {"x" * MAX_REPORT_BYTES: 1.0}}
    small: dict[str, Any] = {field: {"y": 1.0}}
    with pytest.raises(SwarmError, match=rf"{field}: .*the limit is {MAX_REPORT_BYTES}"):
        await running.client.end_episode(episode, reward=1.0, **large)
    await running.client.end_episode(episode, reward=1.0, **small)


def _episodes() -> int:
    """Number of episodes in memory."""
    return sum(type(each) is Episode for each in gc.get_objects())
