"""Advantages of turns from Monte-Carlo values of the states between them, for trees of rollouts.

A tree is a rollout and those that branch from it, or from its branches, after some of its turns.
The state after k turns is a *node*. What continues it is sampled by the same policy: each branch,
and the rest of the rollout from which they branch. With `g` for the value of a continuation,

    g = the value of the first node on the way, or the reward if there is none
    value of a node = mean of g over its continuations
    advantage of the turns up to the next node = g − mean of g over the node's other continuations

(turn-level Monte-Carlo credit, RTMC, arXiv 2604.11037; Tree-GRPO, arXiv 2509.21240). The rollouts
of a group without a prefix continue the same node, the start. Invariant: a node with one
continuation, and one whose continuations have equal values, give advantages of exactly 0. If nodes
are chosen without looking at what follows (every k-th turn), each advantage has the expectation
V(state after the turns) − V(state before them) under the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_loop.records import REWARD_ROUNDING


@dataclass(frozen=True, slots=True)
class TreePart:
    """The turns of a rollout from a node to its next node, or to its end."""

    rollout: int
    first_turn: int
    """0 for those before the first node, whatever turn the rollout's own turns begin with."""


def continuation_advantages(
    rewards: Sequence[float], group: Sequence[int], trunk: Sequence[int], turn: Sequence[int]
) -> dict[TreePart, float]:
    """The advantage of each part of each rollout between two nodes; all arguments are `[R]`.

    `group`: the rollouts with one index begin at the same node. `trunk`: the rollout from which
    this one branches, -1 for none, and `turn`: after how many turns.
    """
    nodes: dict[int, dict[int, list[int]]] = {}
    starts: dict[int, list[int]] = {}
    for rollout, parent in enumerate(trunk):
        if parent < 0:
            starts.setdefault(group[rollout], []).append(rollout)
        else:
            nodes.setdefault(parent, {}).setdefault(turn[rollout], []).append(rollout)
    advantages: dict[TreePart, float] = {}

    def value(rollout: int) -> float:
        """The rollout's value at its own first turn."""
        ahead = rewards[rollout]
        own = nodes.get(rollout, {})
        for after in sorted(own, reverse=True):
            ahead = settle([(TreePart(rollout, after), ahead), *begun(own[after])])
        return ahead

    def begun(rollouts: Sequence[int]) -> list[tuple[TreePart, float]]:
        return [(TreePart(rollout, 0), value(rollout)) for rollout in rollouts]

    def settle(continuations: list[tuple[TreePart, float]]) -> float:
        """Sets the advantages of a node's continuations, and returns its value."""
        values = [g for _, g in continuations]
        for (part, _), advantage in zip(continuations, from_others(values), strict=True):
            advantages[part] = advantage
        low = min(values)
        return low + sum(g - low for g in values) / len(values)

    for rollouts in starts.values():
        settle(begun(rollouts))
    return advantages


def from_others(values: Sequence[float]) -> list[float]:
    """Each value minus the mean of the others; exactly 0 if all are equal up to rounding."""
    low, count = min(values), len(values)
    if count == 1 or max(values) - low <= REWARD_ROUNDING * max(map(abs, values)):
        return [0.0] * count
    total = sum(value - low for value in values)
    return [(value - low) - (total - (value - low)) / (count - 1) for value in values]
