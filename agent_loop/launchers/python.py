"""The `python` launcher: an agent that is a function, sync or async, in a process of its own.

Invariant: the same as for the `command` launcher. The function's module is imported once, in a
server process from which each trial is forked, and never in the trainer's process. The function's
return value is the launcher's reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from agent_loop.launchers.agent_process import ProgramConfig, agent_result, call_agent
from agent_loop.launchers.calls import AgentCall
from agent_loop.launchers.protocol import OVERHEAD_S, LauncherConfig
from agent_loop.outside_parts import FUNCTION_PATTERN, named_as
from agent_loop.processes.functions import function_host, returned, source_file
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.processes.readable import imported
from agent_loop.records import AgentResult, Trial
from agent_loop.reward_values import RewardKey
from proxy.settings.section import Common


class PythonConfig(ProgramConfig, RewardKey, LauncherConfig):
    """Example: PythonConfig(target="my_agents.shop:run")"""

    target: Common[Annotated[str, named_as("agent")]] = Field(pattern=FUNCTION_PATTERN)
    """`module:function`, `path/to/file.py:function`, or the name of an entry point; called with a
    `calls.AgentCall`."""

    @property
    def is_local(self) -> bool:
        return True

    @property
    def files(self) -> tuple[Path, ...]:
        file = source_file(self.target)
        return () if file is None else (file,)

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(each for file in self.files for each in imported(file))

    def build(self, process: ProcessConfig = PROCESS) -> PythonLauncher:
        return PythonLauncher(self, process)


class PythonLauncher:
    """Calls the function once per trial, each call in a process of its own."""

    overhead_s = OVERHEAD_S

    def __init__(self, settings: PythonConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: the function's module does not exist."""
        self._settings = settings
        self._process = process
        self._host = function_host(AgentCall, settings.target, process.pass_env)

    def start(self) -> None:
        self._host.start()

    async def run(self, trial: Trial) -> AgentResult:
        settings = self._settings
        argument = {
            "task": trial.agent_data,
            "prompt": trial.task.prompt,
            "model": trial.model,
            "base_url": trial.base_url,
            "api_key": trial.api_key,
            "workspace": str(trial.workspace.absolute()),
            "trial_id": trial.trial_id,
            "seed": trial.seed,
        }
        ended, result = await call_agent(self._host, trial, settings, self._process, argument)
        return agent_result(ended, returned(ended, result, settings.target, settings.key))

    async def close(self) -> None:
        await self._host.close()
