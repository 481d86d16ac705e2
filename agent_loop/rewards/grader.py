"""Reward from a Python function, run in a process of its own after the agent has ended.

Invariant: a grader that raises, hangs or returns NaN is a `RewardError`, never a reward of 0;
None is *no reward*.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.calls import GradeCall
from agent_loop.outside_parts import FUNCTION_PATTERN, named_as
from agent_loop.processes.environment import inherited_environment
from agent_loop.processes.functions import function_host, returned, source_file
from agent_loop.processes.host import Job
from agent_loop.processes.readable import declared, own_python
from agent_loop.records import FinishedTrial, Graded
from agent_loop.rewards.bench import judge
from agent_loop.rewards.protocol import OwnRewardConfig
from proxy.conversation.messages import Message, load_answer
from proxy.records import Turn
from proxy.settings.section import Common


class GraderConfig(OwnRewardConfig):
    """Example: GraderConfig(target="my_agents.shop:grade")"""

    target: Common[Annotated[str, named_as("reward")]] = Field(pattern=FUNCTION_PATTERN)
    """`module:function`, `path/to/file.py:function`, or the name of an entry point; called with a
    `launchers.calls.GradeCall`."""

    @property
    def files(self) -> tuple[Path, ...]:
        file = source_file(self.target)
        return () if file is None else (file,)

    def build(self) -> Grader:
        return Grader(self)


class Grader:
    """Calls the function once per trial, each call in a process of its own."""

    def __init__(self, settings: GraderConfig) -> None:
        """Raises ConfigurationError: the function's module does not exist, or what is shown."""
        self._settings = settings
        self._host = function_host(GradeCall, settings.target, settings.pass_env)
        self._files = (*settings.files, *declared("grader.show", settings.show), *own_python())

    def start(self) -> None:
        self._host.start()

    async def grade(self, finished: FinishedTrial) -> Graded:
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
            env=inherited_environment(settings.pass_env),
            log=trial.directory / "grader.log",
            timeout_s=settings.timeout_s,
            visible=(result,),
            seen_at=trial.seen_at,
        )
        try:
            result.touch()
            ended = await judge(self._host, job, trial, "grader", files=self._files)
        except (LaunchError, OSError) as error:
            raise RewardError(f"grader: {error}") from error
        if ended.failure is not None:
            raise RewardError(f"grader {settings.target}: {ended.failure}; see {job.log}")
        return returned(ended, result, settings.target, settings.key)

    async def close(self) -> None:
        await self._host.close()


def answers(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """The model's messages of the answered turns, as Chat Completions has them."""
    given = (load_answer(turn.answer) for turn in turns if turn.sampled and turn.answer)
    return [_chat_message(message) for message in given]


def _chat_message(message: Message) -> dict[str, object]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    fields = {"reasoning_content": message.reasoning, "tool_calls": calls}
    given = {name: value for name, value in fields.items() if value}
    return {"role": "assistant", "content": message.text, **given}
