"""The `command` launcher: any program, in a process group and working directory of its own.

Invariant: the program knows only its environment and its arguments; when `run` returns, it and
everything that came of it are ended (see `supervisor.py`), and its output is in `agent.log`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.launchers.environment import (
    GIT,
    agent_environment,
    expand,
    make_workspace,
)
from agent_loop.launchers.processes import Ended, Job, Limits, ProcessHost
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from agent_loop.rewards.protocol import NO_OPINION, Graded
from proxy.errors import ConfigurationError


class CommandSettings(BaseModel):
    """Example: CommandSettings(argv=("python", "agent.py", "--task", "{task_file}"))"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; placeholders as in `environment.expand`."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Set over what every agent gets (`environment.agent_environment`); placeholders too."""
    template: str | None = None
    """Folder that each trial's working directory is a copy of, or `git+REPOSITORY#REVISION`; may
    hold `{task.FIELD}`."""
    grace_s: float = Field(5.0, ge=0)
    """Between SIGTERM and SIGKILL at the deadline or a cancellation."""
    log_bytes: int = Field(1 << 20, ge=1024)
    """Kept of the agent's output: the first and the last half."""
    limits: Limits = Limits()


class CommandLauncher:
    def __init__(self, settings: CommandSettings) -> None:
        """Raises ConfigurationError: the program, or the template folder, does not exist."""
        self._settings = settings
        self._host = ProcessHost()
        program, template = settings.argv[0], settings.template
        if "{" not in program and shutil.which(program) is None:
            raise ConfigurationError(
                f"agent command {program!r} is not an executable on PATH; "
                "install it, or give its full path"
            )
        is_folder = template and "{" not in template and not template.startswith(GIT)
        if template and is_folder and not Path(template).is_dir():
            raise ConfigurationError(f"agent template {template!r} is not a folder")

    async def run(self, trial: Trial) -> AgentResult:
        settings = self._settings
        await asyncio.to_thread(make_workspace, trial, settings.template)
        job = Job(
            argv=[expand(part, trial) for part in settings.argv],
            cwd=trial.workspace,
            env=agent_environment(trial, settings.env),
            log=trial.directory / "agent.log",
            timeout_s=trial.timeout_s,
            grace_s=settings.grace_s,
            log_bytes=settings.log_bytes,
            limits=settings.limits,
        )
        return agent_result(await self._host.run(job))

    async def close(self) -> None:
        await self._host.close()


def agent_result(ended: Ended, reward: Graded = NO_OPINION) -> AgentResult:
    if ended.ended_by == "timeout":
        end = AgentEnd.TIMED_OUT
    else:
        end = AgentEnd.EXITED if ended.failure is None else AgentEnd.CRASHED
    return AgentResult(
        end,
        error=ended.failure,
        wall_s=ended.wall_s,
        reward=reward.value,
        reward_parts=reward.parts,
        metrics={
            "agent_cpu_s": ended.cpu_s,
            "supervisor_cpu_s": ended.supervisor_cpu_s,
            "agent_peak_memory_bytes": ended.peak_memory_bytes,
            "agent_output_bytes": ended.output_bytes,
            "agent_left_over_processes": ended.left_over,
        },
    )
