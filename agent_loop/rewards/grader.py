"""Reward from a Python function, run in a process of its own after the agent has ended.

Invariant: a grader that raises, hangs or returns NaN is a `RewardError`, never a reward of 0;
None is *no reward*.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from pydantic import BaseModel, ConfigDict, Field

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.environment import inherited_environment
from agent_loop.launchers.processes import Job
from agent_loop.launchers.python import TARGET_PATTERN, function_host, returned
from agent_loop.rewards.protocol import Finished, Graded
from proxy.records import Turn


class GraderSettings(BaseModel):
    """Example: GraderSettings(target="my_agents.shop:grade")"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(pattern=TARGET_PATTERN)
    """`module:function`, called with a `launchers.calls.GradeCall`."""
    timeout_s: float = Field(120.0, gt=0)
    key: str = "reward"
    """Which entry trains, where the function returns a dictionary."""


class Grader:
    def __init__(self, settings: GraderSettings) -> None:
        """Raises ConfigurationError: there is no such module."""
        self._settings = settings
        self._host = function_host("grade", settings.target)

    async def grade(self, finished: Finished) -> Graded:
        settings, trial = self._settings, finished.trial
        result = trial.directory / "graded.json"
        argument = {
            "task": dict(trial.task.data),
            "workspace": str(trial.workspace.absolute()),
            "agent_log": str((trial.directory / "agent.log").absolute()),
            "agent_end": finished.agent.end.value,
            "answers": answers(finished.turns),
        }
        job = Job(
            argv=(),
            call={"argument": argument, "result": str(result.absolute())},
            cwd=trial.workspace,
            env=inherited_environment(),
            log=trial.directory / "grader.log",
            timeout_s=settings.timeout_s,
        )
        try:
            ended = await self._host.run(job)
        except LaunchError as error:
            raise RewardError(f"grader: {error}") from error
        if ended.failure is not None:
            raise RewardError(f"grader {settings.target}: {ended.failure}; see {job.log}")
        return returned(ended, result, settings.target, settings.key)

    async def close(self) -> None:
        await self._host.close()


def answers(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """The messages of the answered turns, as the agent was sent them."""
    return [orjson.loads(turn.answer) for turn in turns if turn.sampled and turn.answer]
