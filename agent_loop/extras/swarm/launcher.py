"""The launcher of a run without an agent of its own: the swarm's clients run the agents."""

from __future__ import annotations

from agent_loop.errors import LaunchError
from agent_loop.records import AgentResult, Trial


class SwarmLauncher:
    """Refuses every trial: only held-out tasks would need one."""

    overhead_s = 0.0

    async def run(self, trial: Trial) -> AgentResult:
        raise LaunchError(
            f"trial {trial.trial_id}: the trainer needs an agent of its own to evaluate held-out "
            "tasks; set remote_agent.command.argv, or evaluate in the swarm's clients with "
            'begin_episode(kind="eval")'
        )

    async def close(self) -> None:
        """Nothing is open."""
