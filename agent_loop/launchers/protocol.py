"""The interface of a launcher: it takes a trial, and returns how the trial's agent ended.

Invariant: when `run` returns or is cancelled, nothing that it started is left running.
"""

from __future__ import annotations

from typing import Protocol

from agent_loop.records import AgentResult, Trial
from proxy.settings.section import Section

OVERHEAD_S = 300.0
"""`overhead_s` of a launcher that starts agents at once: seconds for the collection and the
reward."""


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


class LauncherConfig(Section):
    """The section of a launcher. Example: CommandConfig(argv=("true",)).build()"""

    @property
    def needs_prompt(self) -> bool:
        """Whether a task needs a prompt to be run."""
        return False

    def build(self) -> Launcher:
        """Raises ConfigurationError: these settings cannot work on this machine."""
        raise NotImplementedError
