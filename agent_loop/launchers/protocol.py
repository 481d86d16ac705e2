"""The interface of a launcher: it takes a trial, and returns how the trial's agent ended.

Invariant: when `run` returns or is cancelled, nothing that it started is left running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentResult, Trial
from proxy.settings.section import Section

OVERHEAD_S = 300.0
"""`overhead_s` of a launcher that starts agents at once: seconds for the collection and the
reward."""


@dataclass(frozen=True)
class OwnTasks:
    """Tasks that come with an agent. Example: OwnTasks("wordle", {"resets": {"take": 1000}})"""

    name: str
    """The name of their source."""
    train: Mapping[str, object]
    """The source of the tasks to train on, as an entry of `data.train_sources`."""
    held_out: Mapping[str, object] | None = None
    """The source of those that are held out, as an entry of `data.val_sources`."""


class Launcher(Protocol):
    """Implementations: `command`, `python`, `http`, `kubernetes`, `ray`, `harbor`,
    `swarm` (`registry.py`)."""

    @property
    def overhead_s(self) -> float:
        """Seconds that a trial may need in addition to its agent's time: for a queue and the
        sandbox's set-up before the agent starts, for the collection and the reward afterwards."""
        ...

    async def run(self, trial: Trial) -> AgentResult:
        """Runs the agent to its end. Cancelling ends the agent before it raises.

        Raises:
            LaunchError: the agent could not be started or watched. A failure of the agent itself
                is reported in the `AgentResult`.
        """
        ...

    async def close(self) -> None:
        """Ends the processes and connections of the launcher."""
        ...


class HeldOut(Section):
    """The key of agents that bring their own tasks."""

    held_out: int = Field(0, ge=0)
    """Number of the agent's own tasks, the first ones, that are held out for evaluation, if the
    section `data` names no tasks."""


class LauncherConfig(Section):
    """The section of a launcher. Example: CommandConfig(argv=("true",)).build()"""

    @property
    def needs_prompt(self) -> bool:
        """Whether a task needs a prompt to be run."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether agents are processes of this machine."""
        return False

    @property
    def files(self) -> tuple[Path, ...]:
        """The agent's own scripts, which a local agent can read."""
        return ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """What a local agent can read that its command line does not name."""
        return self.files

    @property
    def hidden_fields(self) -> frozenset[str]:
        """The fields of a task that the agent does not get, where `hidden_fields` names none."""
        return frozenset()

    @property
    def own_tasks(self) -> OwnTasks | None:
        """The tasks of the agent's environment, for a run that names none; None: it has none."""
        return None

    def warning(self, sandbox: str) -> str | None:
        """What a user must know about this agent's walls; None: those of `sandbox`, which is
        `light`, `strict` or `off`, are those of this machine."""
        return None

    @property
    def process_keys(self) -> frozenset[str]:
        """The keys of the section `process` that have an effect on this agent."""
        return frozenset(ProcessConfig.model_fields)

    def build(self, process: ProcessConfig = PROCESS) -> Launcher:
        """`process`: the section of the agent's processes.

        Raises ConfigurationError: these settings cannot work on this machine."""
        raise NotImplementedError
