"""The `openenv` launcher: a trial is an episode in an environment of an OpenEnv server.

Invariant: the reward is the sum of the rewards that the environment reported. If the server cannot
be reached or its environment fails, the agent has crashed and has no reward.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agent_loop.extras.environments.openenv_agent import INSTRUCTIONS, OpenEnvCall
from agent_loop.launchers.agent_process import ProgramConfig, agent_result, call_agent
from agent_loop.launchers.protocol import OVERHEAD_S, HeldOut, LauncherConfig, OwnTasks
from agent_loop.processes.functions import function_host, returned
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentResult, Trial

TARGET = "agent_loop.extras.environments.openenv_agent:play"


class OpenEnvConfig(ProgramConfig, HeldOut, LauncherConfig):
    """Example: OpenEnvConfig(url="http://127.0.0.1:8000", seeds=1000)"""

    url: str = Field(pattern="^https?://[^/]+.*[^/]$")
    """URL of the server, without a slash at the end."""
    seeds: int = Field(1000, ge=1)
    """Number of tasks if the section `data` names none: a reset of the environment with the seed
    0, 1, …"""
    max_steps: int = Field(50, ge=1)
    """Maximum number of answers of the model in an episode."""
    instructions: str = INSTRUCTIONS
    """The system message; `{schema}` is replaced by the JSON schema of an action."""

    @property
    def is_local(self) -> bool:
        return True

    @property
    def own_tasks(self) -> OwnTasks:
        first = self.held_out
        train = {"resets": {"skip": first, "take": self.seeds}}
        return OwnTasks("openenv", train, {"resets": {"take": first}} if first else None)

    def build(self, process: ProcessConfig = PROCESS) -> OpenEnvLauncher:
        return OpenEnvLauncher(self, process)


class OpenEnvLauncher:
    """Plays each trial in a process of its own. A task's `reset` has the arguments of the
    environment's reset."""

    overhead_s = OVERHEAD_S

    def __init__(self, settings: OpenEnvConfig, process: ProcessConfig = PROCESS) -> None:
        self._settings = settings
        self._process = process
        self._host = function_host(OpenEnvCall, TARGET)

    def start(self) -> None:
        self._host.start()

    async def run(self, trial: Trial) -> AgentResult:
        settings = self._settings
        argument: dict[str, Any] = {
            "url": settings.url,
            "reset": trial.task.data.get("reset", {}),
            "instructions": settings.instructions,
            "max_steps": settings.max_steps,
            "base_url": trial.base_url,
            "api_key": trial.api_key,
            "model": trial.model,
            "seed": trial.seed,
        }
        ended, result = await call_agent(self._host, trial, settings, self._process, argument)
        return agent_result(ended, returned(ended, result, "openenv", "reward"))

    async def close(self) -> None:
        await self._host.close()
