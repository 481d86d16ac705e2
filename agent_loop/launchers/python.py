"""The `python` launcher: an agent that is a function, sync or async, in a process of its own.

Invariant: as for the `command` launcher; the function's module is imported once, in a server
process from which each trial is forked, never in ours. What it returns is the launcher's reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agent_loop.launchers.command import agent_result
from agent_loop.launchers.environment import agent_environment, make_workspace, prompt_of
from agent_loop.launchers.processes import Ended, Job, Limits, ProcessHost
from agent_loop.launchers.protocol import AgentResult, Trial
from agent_loop.rewards.protocol import Graded, graded
from proxy.errors import ConfigurationError

TARGET_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class PythonSettings(BaseModel):
    """Example: PythonSettings(target="my_agents.shop:run")"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(pattern=TARGET_PATTERN)
    """`module:function`, called with a `calls.AgentCall`."""
    key: str = "reward"
    """Which entry trains, where the function returns a dictionary."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """As for `command`."""
    template: str | None = None
    """As for `command`."""
    grace_s: float = Field(5.0, ge=0)
    log_bytes: int = Field(1 << 20, ge=1024)
    limits: Limits = Limits()


class PythonLauncher:
    def __init__(self, settings: PythonSettings) -> None:
        """Raises ConfigurationError: there is no such module."""
        self._settings = settings
        self._host = function_host("agent", settings.target)

    async def run(self, trial: Trial) -> AgentResult:
        settings = self._settings
        await asyncio.to_thread(make_workspace, trial, settings.template)
        argument = {
            "task": dict(trial.task.data),
            "prompt": prompt_of(trial.task.data),
            "model": trial.model,
            "base_url": trial.base_url,
            "api_key": trial.api_key,
            "workspace": str(trial.workspace.absolute()),
            "trial_id": trial.trial_id,
            "seed": trial.seed,
        }
        result = trial.directory / "returned.json"
        job = Job(
            argv=(),
            call={"argument": argument, "result": str(result.absolute())},
            cwd=trial.workspace,
            env=agent_environment(trial, settings.env),
            log=trial.directory / "agent.log",
            timeout_s=trial.timeout_s,
            grace_s=settings.grace_s,
            log_bytes=settings.log_bytes,
            limits=settings.limits,
        )
        ended = await self._host.run(job)
        return agent_result(ended, returned(ended, result, settings.target, settings.key))

    async def close(self) -> None:
        await self._host.close()


def function_host(kind: str, target: str) -> ProcessHost:
    """Processes whose body is the function. Raises ConfigurationError: no such module."""
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigurationError(
            f"{target!r}: there is no module {module!r} on the path; "
            "install it, or start from the folder that it is in"
        )
    server = (sys.executable, "-m", "agent_loop.launchers.python_server")
    return ProcessHost(server, (kind, target))


def returned(ended: Ended, result: Path, target: str, key: str) -> Graded:
    """What the function returned; no opinion where it did not return.

    Raises:
        RewardError: it returned something that is not a reward.
    """
    if ended.failure is not None or not result.exists():
        return Graded(None)
    value: Any = json.loads(result.read_text())
    return graded(value, key, f"{target}'s return value")
