"""Which trial follows a lost one: its continuation, or a new start.

    the trial is lost, and ...                                it is followed by ...
    its session has an answered turn                          its continuation: a branch that
                                                              replays all answered turns
    the continuation diverged from the recording, or          a new start
      crashed again without a new turn, or was the last one
    every permitted new start is lost, too                    nothing: the rollout has failed

A trial is lost if it failed through no fault of its agent, or if its agent ended as `after` says
and can still be continued. Invariant: a sampled token is trained at most once, because a
continuation *salvages* the session that it continues (`proxy.records.Origin`), and only the last
trial of a rollout is trained. A session is salvaged at most once, so that a trial whose own origin
salvages is retried as a branch of the lost branch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from agent_loop.records import AgentEnd, AgentResult
from proxy.client import ProxyClientError
from proxy.records import Origin, Session, Turn, TurnStatus
from proxy.records.binary import RecordFormatError
from proxy.settings.section import Section

ReadSession = Callable[[str], Awaitable[tuple[Session, Sequence[Turn]]]]
"""Reads a session and its turns, and waits for a proxy that is being restarted."""


class SalvageConfig(Section):
    """Example: SalvageConfig(max_continuations=2)"""

    max_continuations: int = Field(3, ge=1)
    """Number of times that a trial is continued before it is started over; each continuation has
    the whole `timeout_s`."""
    after: tuple[Literal["crashed", "timed_out"], ...] = ("crashed", "timed_out")
    """Ends of an agent after which its trial is continued, although a verifier could judge the
    unfinished work. Trials that failed for another reason (the sandbox, an engine, the verifier)
    are always continued."""


@dataclass(frozen=True, slots=True)
class EarlierTrials:
    """The lost trials of a rollout before its current one."""

    failed: int = 0
    continued: int = 0
    """Number of them, and of the current one, that continue a lost trial."""
    diverged: int = 0
    """Number of continuations that went another way than the recording."""
    lost_tokens: int = 0
    """Tokens that they sampled and that no later trial continues."""


@dataclass(frozen=True, slots=True)
class LostTrial:
    """A trial that is not the last one of its rollout, unless the bounds say so."""

    trial_id: str
    origin: Origin | None
    diverged: bool
    """Whether it is a branch that did not replay its recorded turns."""
    crashed_again: bool
    """Whether it is a continuation that replayed them, and crashed without a call of its own."""


class Retries:
    """The trials of one rollout. Example: `RemoteAgentLoop.run`."""

    def __init__(
        self,
        read: ReadSession,
        max_retries: int,
        salvage: SalvageConfig | None,
        origin: Origin | None,
    ) -> None:
        """`origin`: where the rollout's first trial begins; None: at the agent's start."""
        self.origin = origin
        """Where the next trial begins."""
        self.earlier = EarlierTrials()
        self._read = read
        self._salvage = salvage
        self._starts_left = max_retries
        self._continuations = 0
        """Since the last new start."""
        self._start = origin

    @property
    def lost_after(self) -> frozenset[AgentEnd]:
        """The ends of the next trial's agent after which it can be continued."""
        if self._salvage is None or self._continuations == self._salvage.max_continuations:
            return frozenset()
        return frozenset(map(AgentEnd, self._salvage.after))

    async def follows(self, lost: LostTrial) -> bool:
        """Whether another trial follows, with `origin` and `earlier` set for it. The recorded turns
        are read only if one can follow: for its origin, and for the number of lost tokens."""
        if self._starts_left == 0 and not self._can_continue(lost):
            return False
        turns = await self._turns(lost.trial_id)
        if lost.origin is not None and lost.origin.salvage and turns:
            self._start = _through(lost, self._start)
        continuation = self._continuation(lost, turns)
        if continuation is None:
            if self._starts_left == 0:
                return False
            self._starts_left -= 1
            self._continuations = 0
            self.origin, lost_turns = self._start, turns
        else:
            self._continuations += 1
            self.origin, lost_turns = continuation, turns[continuation.turn :]
        before = self.earlier
        self.earlier = EarlierTrials(
            before.failed + 1,
            before.continued + (continuation is not None),
            before.diverged + lost.diverged,
            before.lost_tokens + _sampled_tokens(lost_turns),
        )
        return True

    def _can_continue(self, lost: LostTrial) -> bool:
        """Whether it is continued if it has an answered turn."""
        if self._salvage is None or self._continuations == self._salvage.max_continuations:
            return False
        return not (lost.diverged or lost.crashed_again)

    def _continuation(self, lost: LostTrial, turns: Sequence[Turn]) -> Origin | None:
        turn = last_good_turn(turns)
        if turn == 0 or not self._can_continue(lost):
            return None
        system = None if lost.origin is None else lost.origin.system
        return Origin(lost.trial_id, turn, salvage=True, system=system)

    async def _turns(self, trial_id: str) -> Sequence[Turn]:
        """Empty if there is no such session, or if it cannot be read."""
        try:
            _, turns = await self._read(trial_id)
        except (ProxyClientError, RecordFormatError):
            return ()
        return turns


def last_good_turn(turns: Sequence[Turn]) -> int:
    """Number of leading turns that a continuation replays: up to the last answered one, and before
    any that is still open."""
    good = 0
    for turn in turns:
        if turn.status is TurnStatus.OPEN:
            break
        if turn.status in (TurnStatus.DONE, TurnStatus.CONTEXT):
            good = turn.index + 1
    return good


def crashed_again(origin: Origin | None, agent: AgentResult | None, turns: Sequence[Turn]) -> bool:
    """Whether the agent of a continuation ended early without a call of its own after the recorded
    ones: the recorded answers, or its tools, end it every time."""
    ended_early = agent is not None and agent.end is not AgentEnd.EXITED
    return ended_early and origin is not None and origin.salvage and len(turns) <= origin.turn


def _through(lost: LostTrial, start: Origin | None) -> Origin | None:
    """The same start by way of the lost branch, which has salvaged the session that `start` names
    and therefore is the one to be salvaged now."""
    if start is None or not start.salvage:
        return start
    return replace(start, session_id=lost.trial_id)


def _sampled_tokens(turns: Sequence[Turn]) -> int:
    own = (turn for turn in turns if turn.status is not TurnStatus.CONTEXT)
    return sum(len(turn.sampled_ids) for turn in own)
