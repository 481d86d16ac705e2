"""The launcher of a run without an agent of its own: its trials are run by a swarm's clients."""

from __future__ import annotations

from agent_loop.errors import LaunchError
from agent_loop.launchers.protocol import AgentResult, Trial


class SwarmLauncher:
    async def run(self, trial: Trial) -> AgentResult:
        raise LaunchError(
            f"trial {trial.trial_id}: held-out tasks need an agent of the trainer's own; set "
            "remote_agent.command.argv, or evaluate in the swarm's clients (kind eval)"
        )

    async def close(self) -> None:
        pass
