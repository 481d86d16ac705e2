"""Section `rollout.tree`: from which turns of a finished rollout others branch.

A branch replays the recorded turns before a chosen one, in a fresh workspace, and samples that turn
and what follows again. Invariant: only turns that the rollout trains are chosen, and the choice is
a function of the rollout and the section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from agent_loop.records import Rollout
from proxy.settings.section import Section


class TreeConfig(Section):
    """Example: TreeConfig(every=2, children=2)"""

    every: int | None = Field(None, ge=1)
    """Branch at the turns whose index is a multiple of this number."""
    most_uncertain: int | None = Field(None, ge=1)
    """Branch at this number of turns, whose sampled tokens have the lowest mean log-probability: an
    estimate of their entropy."""
    before_call: re.Pattern[str] | None = None
    """Branch at the turns whose answer has a tool call in which this regular expression is found,
    in the first 500 characters of `NAME ARGUMENTS`: before the call that decides a task, such as
    `^submit ` or `git commit`."""
    children: int = Field(2, ge=1)
    """Number of branches at each chosen turn."""
    max_points: int = Field(8, ge=1)
    """Maximum number of chosen turns of a rollout; of more, the first ones."""

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        given = (self.every, self.most_uncertain, self.before_call)
        if sum(each is not None for each in given) != 1:
            raise ValueError(
                f"tree.every={self.every}, tree.most_uncertain={self.most_uncertain} and "
                f"tree.before_call={self.before_call and self.before_call.pattern}: set one of "
                "them, which chooses the turns at which rollouts branch"
            )
        return self

    def points(self, rollout: Rollout) -> list[int]:
        """The turns that are sampled again, in order; the first turn is not among them, because a
        trial without a branch samples it."""
        if not rollout.trainable:
            return []
        surprise = {t: s for t, s in turn_surprise(rollout).items() if t > 0}
        if self.every is not None:
            chosen = [turn for turn in sorted(surprise) if turn % self.every == 0]
        elif self.before_call is not None:
            calls = {turn: rollout.turn_calls.get(turn, "").split("\n") for turn in surprise}
            chosen = [t for t in sorted(calls) if any(map(self.before_call.search, calls[t]))]
        else:
            chosen = sorted(surprise, key=lambda turn: -surprise[turn])[: self.most_uncertain]
        return sorted(chosen[: self.max_points])


def turn_surprise(rollout: Rollout) -> Mapping[int, float]:
    """Turn that is trained → mean of −log p of its sampled tokens, in nats."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for segment in rollout.segments:
        for turn in set(segment.turns[segment.mask].tolist()):
            own = segment.mask & (segment.turns == turn)
            sums[turn] = sums.get(turn, 0.0) - float(segment.logprobs[own].sum())
            counts[turn] = counts.get(turn, 0) + int(own.sum())
    return {turn: total / counts[turn] for turn, total in sums.items()}
