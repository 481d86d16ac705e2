"""The example's dataset: Harbor's oracle solves every kind of task, and doing nothing solves
none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from examples.harbor.make_tasks import write_task
from harbor_sdk import AgentRunClient, AgentRunRequest, AgentSpec
from tests.e2e.harbor_server import harbor_server, needs_harbor

TASKS = Path(__file__).resolve().parents[2] / "examples/mini_swe_agent/heldout.jsonl"

pytestmark = needs_harbor


async def test_oracle_solves_every_kind_and_doing_nothing_solves_none(tmp_path: Path) -> None:
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    folders = [write_task(tmp_path / "in", task) for task in {t["kind"]: t for t in tasks}.values()]
    with harbor_server(tmp_path / "state", "--tasks", str(tmp_path / "in")) as server:
        async with AgentRunClient(server.url) as client:

            async def reward(folder: Path, agent: str) -> float:
                request = AgentRunRequest(agent=AgentSpec(name=agent), task_path=str(folder))
                run = await client.wait((await client.submit(request)).run_id, timeout_s=60)
                assert run.rewards is not None, run.error
                return run.rewards["reward"]

            done = await asyncio.gather(*(reward(folder, "oracle") for folder in folders))
            nothing = await asyncio.gather(*(reward(folder, "nop") for folder in folders))
    assert len(folders) == 5
    assert done == [1.0] * 5
    assert nothing == [0.0] * 5
