"""A filter: keeps groups of which some trials succeed, but not too many (`rollout.filter`)."""

from __future__ import annotations

from agent_loop.records import Group


def neither_easy_nor_hard(group: Group, most: float = 0.9) -> bool:
    rewards = [r.reward for r in group.rollouts if r.trainable and r.reward is not None]
    return 0 < sum(rewards) / len(rewards) <= most
