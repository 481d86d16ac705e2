"""What a launcher is to the loop: a trial in, how the agent ended out.

Invariant: when `run` returns or is cancelled, nothing that it started is left running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from agent_loop.records import Task


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt at a task, with a session and a directory of its own.

    Example: Trial(trial_id="sum-17-9fJq", task=Task(…), base_url="http://127.0.0.1:8080/v1",
                   api_key="sk-…", model="policy", directory=Path("run/trials/sum-17-9fJq"),
                   timeout_s=300.0, seed=7)
    """

    trial_id: str
    task: Task
    base_url: str
    """With `/v1`, as OpenAI SDKs want it."""
    api_key: str
    model: str
    """The name that the agent asks for."""
    directory: Path
    """Exists and is empty before the launcher runs; logs stay in it."""
    timeout_s: float
    """The agent's time, from its start."""
    seed: int = 0

    @property
    def workspace(self) -> Path:
        """The agent's working directory."""
        return self.directory / "work"

    @property
    def task_file(self) -> Path:
        """The task's data as JSON."""
        return self.directory / "task.json"


class AgentEnd(StrEnum):
    EXITED = "exited"
    """By itself, with success."""
    CRASHED = "crashed"
    """By itself, with an error (an exit code other than 0, an exception)."""
    TIMED_OUT = "timed_out"
    """Ended by us at its deadline. Its work may still be verified."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How the agent ended.

    Example: AgentResult(AgentEnd.CRASHED, error="exit code 2", wall_s=1.4)
    """

    end: AgentEnd
    error: str | None = None
    """One line, when `end` is not EXITED."""
    wall_s: float = 0.0
    reward: float | None = None
    """What the launcher itself knows of the reward (the function's return value, …)."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Launcher(Protocol):
    """Implementations: `command`, `python`, `http`, `harbor`, `swarm`."""

    async def run(self, trial: Trial) -> AgentResult:
        """Runs the agent to its end. Cancelling it ends the agent before it raises.

        Raises:
            LaunchError: the agent could not be started or watched (never the agent's own fault).
        """
        ...

    async def close(self) -> None: ...
