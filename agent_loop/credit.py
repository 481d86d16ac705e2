"""Which turns a trial's reward is credited to, and how much of it: a return per turn.

The return of turn t, down the tree of turns (each behind the one whose answer it continues):

    G_t = own_t + F_t        F_t = lands_t + discount · mean of F over the turns that continue t

`own_t` are rewards posted for that turn alone; `lands_t` is the trial's reward where a credited
chain of turns ends, and rewards posted for the branch that ends in t. So a turn is discounted by
its distance to the end of its own chain, and an unrelated side call changes nothing (in order of
arrival it would). Invariant: a turn that a policy does not credit is told as such, so that it is
context and not trained; a return of 0 would train it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from proxy.records import ForkCause, Reward, Turn

REWRITTEN = (
    ForkCause.COMPACTION,
    ForkCause.TOOLS_CHANGED,
    ForkCause.SYSTEM_CHANGED,
    ForkCause.REASONING_DROPPED,
    ForkCause.UNPROVABLE_BRIDGE,
)
"""Causes by which a conversation goes on although its tokens do not."""


class CreditSettings(BaseModel):
    """Example: CreditSettings(policy="main_path", turn_discount=0.95)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["all", "main_path", "branch"] = "all"
    """`all`: every answered turn, side calls (titles, sub-agents, summaries) too. `main_path`:
    only turns that lead to the last turn of the main conversation. `branch`: those, and the
    branches for which a reward was posted."""
    turn_discount: float = Field(1.0, gt=0, le=1)
    """Per turn between a turn and the end of its chain."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Example: Credit(returns={0: 0.9, 1: 1.0}, untrained=frozenset({2}))"""

    returns: Mapping[int, float]
    """Of the credited turns."""
    untrained: frozenset[int]
    """Turns that take no credit."""


def assign_credit(
    turns: Sequence[Turn],
    reward: float | None,
    posted: Sequence[Reward],
    settings: CreditSettings,
) -> Credit:
    """`reward` is the trial's, None if only turns or branches have one; `posted` are all rewards
    that were posted for the session, those for the whole trial being part of `reward` already.
    """
    chain = Chains(turns)
    branches = [r for r in posted if r.turn is not None and r.branch]
    main = chain.main_path()
    credited = set(chain.answered)
    ends = {t for t in credited if not chain.next[t]}
    if settings.policy != "all":
        credited, ends = set(main), set(main[-1:])
    if settings.policy == "branch":
        credited |= {t for r in branches if r.turn is not None for t in chain.path(r.turn)}
    lands = dict.fromkeys(ends, reward or 0.0)
    for branch in branches:
        if branch.turn in credited:
            lands[branch.turn] = lands.get(branch.turn, 0.0) + branch.value
    flow = _flow(chain, credited, lands, settings.turn_discount)
    for own in posted:
        if own.turn in credited and not own.branch:
            flow[own.turn] += own.value
    return Credit(flow, frozenset(range(len(turns))) - credited)


class Chains:
    """Which answered turn each one continues, and which conversation it belongs to."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self.answered = [turn.index for turn in turns if turn.sampled]
        self.before: dict[int, int | None] = {}
        self.next: dict[int, list[int]] = {index: [] for index in self.answered}
        self.conversation: dict[int, int] = {}
        for index in range(len(turns)):
            before = self._continues(index)
            self.before[index] = before
            self.conversation[index] = index if before is None else self.conversation[before]
            if before is not None and turns[index].sampled:
                self.next[before].append(index)

    def path(self, index: int) -> list[int]:
        """The answered turns that lead to `index`, itself included."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            if self._turns[at].sampled:
                path.append(at)
            at = self.before[at]
        return path[::-1]

    def main_path(self) -> list[int]:
        """The chain to the last turn of the conversation that goes on longest, from its first
        turn to its last: sub-agents run in between, titles and summaries take one call."""
        spans: dict[int, list[int]] = {}
        for index in self.answered:
            spans.setdefault(self.conversation[index], []).append(index)
        if not spans:
            return []
        longest = max(spans.values(), key=lambda s: (s[-1] - s[0], len(s), -s[0]))
        return self.path(longest[-1])

    def _continues(self, index: int) -> int | None:
        """The answered turn whose answer is the last that this turn's prompt holds."""
        turn = self._turns[index]
        if turn.fork_cause is ForkCause.NEW_CONVERSATION:
            return None
        if turn.fork_cause in REWRITTEN:
            return self._latest_in_conversation(turn)
        at = turn.parent
        while at is not None:
            parent = self._turns[at]
            if parent.sampled and parent.path_tokens <= turn.shared_tokens:
                return at
            at = parent.parent
        return None

    def _latest_in_conversation(self, turn: Turn) -> int | None:
        """For a rewritten prompt, whose tokens do not say it: what this caller last answered, in
        the conversation that it shares tokens with."""
        earlier = [
            index
            for index in self.answered
            if index < turn.index and self._turns[index].agent_id == turn.agent_id
        ]
        if turn.parent is not None:
            home = self.conversation[turn.parent]
            earlier = [i for i in earlier if self.conversation[i] == home] or earlier
        return earlier[-1] if earlier else None


def _flow(
    chain: Chains, credited: set[int], lands: Mapping[int, float], discount: float
) -> dict[int, float]:
    flow: dict[int, float] = {}
    for index in sorted(credited, reverse=True):
        onward = [flow[after] for after in chain.next[index] if after in credited]
        mean = sum(onward) / len(onward) if onward else 0.0
        flow[index] = lands.get(index, 0.0) + discount * mean
    return flow
