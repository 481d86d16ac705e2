"""Credit without summaries (`remote_agent.credit.function`): calls that summarise the history are
context, and every other answer is trained with the trial's reward."""

from __future__ import annotations

from collections.abc import Sequence

from agent_loop.trial.credit import summaries
from proxy.records import Turn


def masked(turns: Sequence[Turn], reward: float | None) -> dict[int, float]:
    left_out = set(summaries(turns).values())
    return {turn.index: 1.0 for turn in turns if turn.sampled and turn.index not in left_out}
