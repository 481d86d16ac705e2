"""The part of a group that one of several policies sampled.

Invariant: each trained token of a rollout is in the part of exactly one policy, the one that
sampled it, and its part has the same segments as if no other policy were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agent_loop.records import Group, Rollout
from agent_loop.trajectory import prune


def parts_of(groups: Sequence[Group], policy: str) -> list[Group]:
    """The groups, each with what the policy sampled as the only tokens that are trained. A rollout
    without such tokens cannot be trained, and is in no baseline of this policy."""
    return [
        replace(group, rollouts=tuple(_part(rollout, policy) for rollout in group.rollouts))
        for group in groups
    ]


def _part(rollout: Rollout, policy: str) -> Rollout:
    own = [turn for turn, name in rollout.turn_policies.items() if name == policy]
    restricted = (each.training_only(np.isin(each.turns, own)) for each in rollout.segments)
    stale = {turn: count for turn, count in rollout.stale_turns.items() if turn in own}
    return replace(rollout, segments=prune(list(restricted)), stale_turns=stale)
