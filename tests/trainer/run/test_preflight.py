"""The first trial of a run: two tasks that fail end it, one does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.records import Group, Rollout, RolloutStatus, Task
from tests.agent_loop.virtual_time import run_in_virtual_time
from trainer.errors import TrainingError
from trainer.run.preflight import Preflight

TASKS = [Task("broken", {}), Task("whole", {})]


class Trials:
    """Fails the tasks in `failing`."""

    def __init__(self, *failing: str, seconds: float = 0.0) -> None:
        self._failing = failing
        self._seconds = seconds
        self.tried: list[str] = []

    async def run(self, task: Task, **_: Any) -> Rollout:
        self.tried.append(task.task_id)
        await asyncio.sleep(self._seconds)
        if task.task_id in self._failing:
            error = f"exit code 2; see /a/trials/{task.task_id}-AbPKSthLiicd/agent.log"
            return Rollout(task.task_id, task, RolloutStatus.FAILED, None, error=error)
        return Rollout(task.task_id, task, RolloutStatus.DONE, 0.0)


def preflight(
    loop: Trials, folder: Path, *checks: Callable[[Group], object], said: list[str] | None = None
) -> Preflight:
    return Preflight(loop, TASKS, 60.0, folder, checks, (said or []).append)


async def test_one_task_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    loop = Trials("broken")
    await preflight(loop, tmp_path).run(0)
    assert loop.tried == ["broken", "whole"]


async def test_two_tasks_that_fail_end_it_with_the_agents_last_lines(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "agent.log").write_text("Traceback\n\nKeyError: 'tools'\n")
    with pytest.raises(TrainingError, match=r"exit code 2; its last lines: .*KeyError: 'tools'"):
        await preflight(Trials("broken", "whole"), tmp_path).run(0)


async def test_own_filters_and_metrics_are_called_with_the_first_trial(tmp_path: Path) -> None:
    def wants(group: Group) -> bool:
        return bool(group.rollouts[0].metrics["speed"] > 1)

    loop = Trials()
    with pytest.raises(TrainingError, match=r"a part of your own failed .* KeyError: 'speed'"):
        await preflight(loop, tmp_path, wants).run(0)
    assert loop.tried == ["broken"]


def test_a_trial_that_takes_long_does_not_delay_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    loop = Trials("broken", "whole", seconds=3600.0)
    run_in_virtual_time(Preflight(loop, TASKS, 60.0, tmp_path, [], said.append).run(0))
    assert said == ["preflight: its trial runs for 60 s already: going on"]
    assert loop.tried == ["broken"]
