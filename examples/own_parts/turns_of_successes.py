"""A metric: how many turns the successful trials took (`logging.metrics`)."""

from __future__ import annotations

from collections.abc import Sequence

from agent_loop.records import Rollout


def turns_of_successes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    turns = [rollout.num_turns for rollout in rollouts if rollout.reward == 1]
    return {"success/turns": sum(turns) / len(turns)} if turns else {}
