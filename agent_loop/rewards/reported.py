"""Rewards that are reported: by the launcher, or by a client that posted them to the session.

Invariant: without a report there is no reward; it never becomes a reward of 0.
"""

from __future__ import annotations

from agent_loop.records import NO_REWARD, FinishedTrial, Graded


class LauncherReward:
    """The reward that the launcher knows: the function's return value, Harbor's verifier, …"""

    async def grade(self, finished: FinishedTrial) -> Graded:
        return Graded(finished.agent.reward, finished.agent.reward_parts)

    async def close(self) -> None:
        pass


class PostedReward:
    """The sum of the rewards that were posted for the whole trial (`POST /sessions/{id}/rewards`).
    Rewards of turns and branches are credited to those turns and branches (`credit.py`)."""

    async def grade(self, finished: FinishedTrial) -> Graded:
        rewards = [reward for reward in finished.session.rewards if reward.turn is None]
        if not rewards:
            return NO_REWARD
        parts = {reward.key: reward.value for reward in rewards}
        for reward in rewards:
            parts |= {f"{reward.key}.{name}": value for name, value in reward.parts.items()}
        return Graded(sum(reward.value for reward in rewards), parts)

    async def close(self) -> None:
        pass
