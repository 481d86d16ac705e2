"""An environment whose only seat is not trained."""

from __future__ import annotations

import verifiers.v1 as vf
from vf_sums import SumTaskset


class UntrainedEnv(vf.SingleAgentEnv):
    async def setup(self, agents: vf.Agents) -> None:
        agents.agent.trainable = False


__all__ = ["SumTaskset", "UntrainedEnv"]
