"""Rewards that somebody else reports: the launcher, or whoever posted them to the session.

Invariant: nothing reported is no opinion, never 0.
"""

from __future__ import annotations

from agent_loop.rewards.protocol import NO_OPINION, Finished, Graded


class LauncherReward:
    """What the launcher knows: the agent function's return value, Harbor's verifier, …"""

    async def grade(self, finished: Finished) -> Graded:
        return Graded(finished.agent.reward, finished.agent.reward_parts)

    async def close(self) -> None:
        pass


class PostedReward:
    """The sum of what was posted for the whole trial (`POST /sessions/{id}/rewards`). Rewards of
    turns and branches are credited to those (`credit.py`)."""

    async def grade(self, finished: Finished) -> Graded:
        rewards = [reward for reward in finished.session.rewards if reward.turn is None]
        if not rewards:
            return NO_OPINION
        parts = {reward.key: reward.value for reward in rewards}
        for reward in rewards:
            parts |= {f"{reward.key}.{name}": value for name, value in reward.parts.items()}
        return Graded(sum(reward.value for reward in rewards), parts)

    async def close(self) -> None:
        pass
