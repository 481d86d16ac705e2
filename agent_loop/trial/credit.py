"""Credits a trial's reward to its turns: which turns get a return, and how large it is.

The turns form a tree, in which a turn's parent is the turn whose answer it continues. The return of
turn t is

    G_t = own_t + F_t        F_t = lands_t + discount · mean of F over the turns that continue t

`own_t` is the sum of the rewards posted for turn t alone. `lands_t` is the trial's reward if t is
the end of a credited chain, plus the rewards posted for the branch that ends in t. A turn is thus
discounted by its distance to the end of its own chain, and an unrelated side call does not change
its return (it would if distances were counted in order of arrival). The first turn after a
compaction continues both the turn before it and the call that sampled the summary, so that a
summary's return is that of what follows it. Invariant: a turn that the credit policy leaves out is
listed in `untrained`, so that it is context; a return of 0 would train it.

A compaction's own turns are the calls in which an agent summarises its history. An agent that
compacts asks for a summary and then begins again with a prompt that quotes the answer. Such a
prompt is a fork with the cause `compaction`; the summary is the latest earlier answer of which the
prompt quotes a line, as in `proxy.token_tree.fork_cause`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, Self

from pydantic import Field, model_validator

from agent_loop.errors import CreditError
from agent_loop.outside_parts import OwnFunction
from agent_loop.reward_values import REWARD_LIMIT, shown
from proxy.conversation.messages import load_answer
from proxy.conversation.recorded import load_request
from proxy.records import ForkCause, Reward, Turn
from proxy.settings.section import Section
from proxy.token_tree.fork_cause import QUOTED_TURNS, AnswerMarks, is_quoted


def summaries(turns: Sequence[Turn]) -> dict[int, int]:
    """Index of the first turn after each compaction → index of the turn that sampled its summary.

    A compaction whose request was not recorded has no entry.
    """
    return {
        turn.index: found
        for turn in turns
        if turn.fork_cause is ForkCause.COMPACTION
        if (found := _quoted(turn, turns)) is not None
    }


def _quoted(turn: Turn, turns: Sequence[Turn]) -> int | None:
    request = load_request(turn)
    if request is None:
        return None
    answered = [earlier for earlier in turns[: turn.index] if earlier.sampled and earlier.answer]
    for earlier in reversed(answered[-QUOTED_TURNS:]):
        if is_quoted(request.messages, {AnswerMarks.of(load_answer(earlier.answer)).quote}):
            return earlier.index
    return None


REWRITTEN = (
    ForkCause.COMPACTION,
    ForkCause.TOOLS_CHANGED,
    ForkCause.SYSTEM_CHANGED,
    ForkCause.IMAGE_CHANGED,
    ForkCause.REASONING_DROPPED,
    ForkCause.UNPROVABLE_BRIDGE,
)
"""Causes of forks after which the same conversation continues with other tokens."""


class OwnCredit(OwnFunction):
    """A function of your own, which returns the share of the reward that each credited turn gets.

    It returns index of a turn → share. A turn that is not listed is context, and not trained."""

    kind = "credit"

    def __call__(self, turns: Sequence[Turn], reward: float | None) -> Mapping[int, float]:
        shares: Mapping[int, float] = self.called(turns, reward)
        answered = {turn.index for turn in turns if turn.sampled}
        if not isinstance(shares, Mapping) or not shares.keys() <= answered:
            raise CreditError(
                f"{self.target} returned {shares!r:.100}; it must map indices of answered turns, "
                f"here {sorted(answered)}, to their shares of the reward"
            )
        for turn, share in shares.items():
            if not isinstance(share, Real) or not abs(share) <= REWARD_LIMIT:
                raise CreditError(
                    f"{self.target} returned the share {shown(share)} for turn {turn}; it must be "
                    f"a number between -{REWARD_LIMIT:g} and {REWARD_LIMIT:g}"
                )
        return {turn: float(share) for turn, share in shares.items()}


class CreditConfig(Section):
    """A call in which the agent summarises its history (compaction) is trained, under every policy,
    with the return of what follows the summary.

    Example: CreditConfig(policy="main_path", turn_discount=0.95)
    """

    policy: Literal["all", "main_path", "branch"] = "all"
    """`all`: every answered turn, including side calls (titles, sub-agents, summaries).
    `main_path`: only turns that lead to the last turn of the main conversation. `branch`: the main
    path, and the branches for which a reward was posted."""
    turn_discount: float = Field(1.0, gt=0, le=1)
    """Factor on the reward for each turn between a turn and the end of its chain."""
    function: OwnCredit | None = None
    """A function of your own, in place of the other keys."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        fields = type(self).model_fields
        others = [
            name
            for name in ("policy", "turn_discount")
            if getattr(self, name) != fields[name].default
        ]
        if self.function is not None and others:
            raise ValueError(
                f"credit.function={self.function.target} takes the place of "
                f"{', '.join(f'credit.{name}' for name in others)}; remove what is not needed"
            )
        return self


@dataclass(frozen=True, slots=True)
class Credit:
    """Example: Credit({0: 0.9, 1: 1.0}, shares={0: 0.9, 1: 1.0}, untrained=frozenset({2}))"""

    returns: Mapping[int, float]
    """Index of a credited turn → its return."""
    shares: Mapping[int, float]
    """Index of a credited turn → how much a trial's reward of 1 adds to its return."""
    untrained: frozenset[int]
    """Indices of the turns that are not credited."""


def assign_credit(
    turns: Sequence[Turn],
    reward: float | None,
    posted: Sequence[Reward],
    settings: CreditConfig,
) -> Credit:
    """The returns of a session's turns.

    `reward` is the trial's reward, or None if only turns or branches have rewards. `posted` holds
    all rewards that were posted for the session; rewards for the whole trial are already part of
    `reward`.

    Raises:
        CreditError: a function of the user's own returned no shares.
    """
    if settings.function is not None:
        return _by_function(settings.function, turns, reward, posted)
    chain = Chains(turns)
    branches = [r for r in posted if r.turn is not None and r.branch]
    main = chain.main_path()
    credited = set(chain.answered)
    ends = {t for t in credited if not chain.next[t]}
    if settings.policy != "all":
        credited, ends = set(main), set(main[-1:])
    if settings.policy == "branch":
        credited |= {t for r in branches if r.turn is not None for t in chain.path(r.turn)}
    shares = _flow(chain, credited, dict.fromkeys(ends, 1.0), settings.turn_discount)
    lands = dict.fromkeys(ends, reward or 0.0)
    for branch in branches:
        if branch.turn in credited:
            lands[branch.turn] = lands.get(branch.turn, 0.0) + branch.value
    flow = _flow(chain, credited, lands, settings.turn_discount)
    for own in posted:
        if own.turn in credited and not own.branch:
            flow[own.turn] += own.value
    return Credit(
        {turn: flow[turn] for turn in flow if turn in credited},
        {turn: shares[turn] for turn in shares if turn in credited},
        frozenset(range(len(turns))) - credited,
    )


def _by_function(
    function: OwnCredit, turns: Sequence[Turn], reward: float | None, posted: Sequence[Reward]
) -> Credit:
    """Rewards that were posted for a turn or a branch are added to the turn itself."""
    shares = function(turns, reward)
    returns = {turn: share * (reward or 0.0) for turn, share in shares.items()}
    for own in posted:
        if own.turn in returns:
            returns[own.turn] += own.value
    return Credit(returns, shares, frozenset(range(len(turns))) - shares.keys())


class Chains:
    """For each turn, the answered turn that it continues and the conversation that it is in."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self.answered = [turn.index for turn in turns if turn.sampled]
        self.before: dict[int, int | None] = {}
        self.next: dict[int, list[int]] = {index: [] for index in self.answered}
        self.summaries = summaries(turns)
        self.conversation: dict[int, int] = {}
        for index in range(len(turns)):
            before = self._continues(index)
            self.before[index] = before
            self.conversation[index] = index if before is None else self.conversation[before]
            if not turns[index].sampled:
                continue
            for each in {before, self.summaries.get(index)}:
                if each is not None:
                    self.next[each].append(index)

    def path(self, index: int) -> list[int]:
        """The answered turns that lead to `index`, including `index` itself and the calls that
        sampled the summaries in between."""
        path: set[int] = set()
        at: int | None = index
        while at is not None:
            if self._turns[at].sampled:
                path |= {at, self.summaries.get(at, at)}
            at = self.before[at]
        return sorted(path)

    def main_path(self) -> list[int]:
        """The chain to the last turn of the main conversation: the one with the largest distance
        between its first and its last turn. Sub-agents run within that distance, and titles and
        summaries take one call."""
        spans: dict[int, list[int]] = {}
        for index in self.answered:
            spans.setdefault(self.conversation[index], []).append(index)
        if not spans:
            return []
        longest = max(spans.values(), key=lambda s: (s[-1] - s[0], len(s), -s[0]))
        return self.path(longest[-1])

    def _continues(self, index: int) -> int | None:
        """The answered turn whose answer is the last one in this turn's prompt."""
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
        """The latest answered turn of the same caller, if possible in the conversation with which
        this turn shares tokens. For a rewritten prompt, whose tokens do not show its parent."""
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
