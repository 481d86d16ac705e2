"""Builds a `Rollout` from the recorded turns, the reward, and how the agent ended.

`RemoteAgentLoop`, the swarm and the verl plug-in all build their rollouts here. The end of a trial
determines the rollout's status:

    the agent ended by itself                     → done (truncated if its last answer was)
    the agent ran out of time, or crashed         → truncated; a verifier's reward counts
    it crashed without a reward, or because a     → failed
      call was cut on the proxy's side
    a search rule ended its session               → truncated
    it never got an answer from the model         → failed
    launcher, verifier or proxy failed            → failed (`failed_rollout`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_loop.records import (
    CALL_CHARS,
    AgentEnd,
    AgentResult,
    FinishedTrial,
    Graded,
    Rollout,
    RolloutStatus,
    Task,
)
from agent_loop.reward_values import within_limit
from agent_loop.rewards.protocol import RewardSource
from agent_loop.trajectory import build_segments
from agent_loop.trial.credit import Credit, CreditConfig, assign_credit
from agent_loop.trial.salvage import EarlierTrials
from proxy.conversation.messages import load_answer
from proxy.records import (
    FinishReason,
    Mark,
    Origin,
    Reward,
    RuleAction,
    SessionKind,
    Turn,
    TurnStatus,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is known about a trial before it starts.

    Example: Attempt("sum-17-9fJq", Task(…), SessionKind.TRAIN, seed=7, version=12)
    """

    trial_id: str
    task: Task
    kind: SessionKind = SessionKind.TRAIN
    seed: int = 0
    version: int = 0
    """The policy's version when the trial starts."""
    logs: str | None = None
    """Folder with the agent's output."""
    earlier: EarlierTrials = field(default_factory=EarlierTrials)
    """The lost trials of the same rollout."""
    origin: Origin | None = None
    """The recorded turns with which the trial begins (docs/rewind.md)."""
    prefix: str = ""
    """See `Rollout.prefix`."""
    lost_after: frozenset[AgentEnd] = frozenset()
    """Ends of the agent after which the trial is lost, because it can be continued."""
    policies: tuple[str, ...] = ("",)
    """The policies that are trained. What other policies sampled in the trial is context."""
    started_at: float = 0.0
    """See `Rollout.started_at`."""


async def grade_trial(
    attempt: Attempt,
    finished: FinishedTrial,
    rewards: RewardSource,
    credit: CreditConfig,
    *,
    started: float,
    times_s: Mapping[str, float] | None = None,
) -> Rollout:
    """The rollout of a finished trial, with the reward that the source gives it. `started` is when
    the trial began, by `time.monotonic`. `times_s` is added to the recorded times.

    Raises:
        RewardError: the source cannot judge the trial.
        TrajectoryError: the turns are not a tree of sampled tokens.
    """
    began = time.monotonic()
    graded = await rewards.grade(finished)
    ended = time.monotonic()
    return build_rollout(
        attempt,
        finished.agent,
        finished.turns,
        graded,
        posted=finished.session.rewards,
        marks=finished.session.marks,
        credit=credit,
        times_s={**(times_s or {}), "verifier": ended - began, "total": ended - started},
    )


def build_rollout(
    attempt: Attempt,
    agent: AgentResult,
    turns: Sequence[Turn],
    graded: Graded,
    *,
    posted: Sequence[Reward] = (),
    marks: Sequence[Mark] = (),
    credit: CreditConfig | None = None,
    times_s: Mapping[str, float] | None = None,
) -> Rollout:
    """The rollout of a trial that ran to its end.

    `posted` holds all rewards that were posted for the session; rewards for the whole trial are
    already part of `graded`. `marks` are those of the session: a search rule with the action
    `zero_reward` makes the reward 0, with its name in `reward_parts`, and one that has ended the
    session makes the trial truncated.

    `times_s` is added to the recorded times (`agent`, `generate`).

    Raises:
        RewardError: a reward, or what a turn gets of it, is NaN or above REWARD_LIMIT.
        TrajectoryError: the turns are not a tree of sampled tokens.
    """
    zeroed = [mark.rule for mark in marks if mark.action is RuleAction.ZERO_REWARD]
    if zeroed:
        graded, posted = _zero(graded, zeroed), ()
    credited = assign_credit(turns, graded.value, posted, credit or CreditConfig())
    reward, of_turns = _with_turn_rewards(graded, posted)
    _check_rewards(reward, credited)
    ending = _ending(attempt, agent, turns, reward, _ended_by(marks))
    others = {turn.index for turn in turns if turn.policy not in attempt.policies}
    is_eval = attempt.kind is SessionKind.EVAL
    untrained = range(len(turns)) if is_eval else credited.untrained | others
    segments = build_segments(turns, untrained=untrained)
    wanted = sum(len(turn.sampled_ids) for turn in _answered(turns) if turn.index not in untrained)
    tied = wanted - sum(int(segment.mask.sum()) for segment in segments)
    return Rollout(
        trial_id=attempt.trial_id,
        task=attempt.task,
        status=ending.status,
        reward=reward.value,
        segments=segments,
        reward_parts=reward.parts,
        turn_returns=credited.returns,
        turn_shares=credited.shares,
        reward_of_turns=of_turns,
        turn_policies=_turn_policies(attempt, turns),
        turn_calls=_turn_calls(turns),
        truncated_turns=_truncated(turns),
        num_turns=len(_answered(turns)),
        forks=_forks(turns),
        started_version=attempt.version,
        error=ending.error,
        times_s={**_times_s(agent, turns), **(times_s or {})},
        metrics={**_metrics(attempt, agent, turns), "tied_tokens": tied},
        logs=attempt.logs,
        seed=attempt.seed,
        prefix=attempt.prefix,
        started_at=attempt.started_at,
    )


def failed_rollout(
    attempt: Attempt,
    error: str,
    *,
    agent: AgentResult | None = None,
    turns: Sequence[Turn] = (),
    times_s: Mapping[str, float] | None = None,
) -> Rollout:
    """The rollout of a trial that failed through no fault of its agent, with everything that was
    known by then."""
    return Rollout(
        trial_id=attempt.trial_id,
        task=attempt.task,
        status=RolloutStatus.FAILED,
        reward=None,
        truncated_turns=_truncated(turns),
        num_turns=len(_answered(turns)),
        forks=_forks(turns),
        started_version=attempt.version,
        error=error,
        times_s={**_times_s(agent, turns), **(times_s or {})},
        metrics=_metrics(attempt, agent, turns),
        logs=attempt.logs,
        seed=attempt.seed,
        prefix=attempt.prefix,
        started_at=attempt.started_at,
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    status: RolloutStatus
    error: str | None = None


def _ended_by(marks: Sequence[Mark]) -> str | None:
    """Why a search rule has ended the session; None: none has."""
    mark = next((mark for mark in marks if mark.action is RuleAction.END), None)
    return None if mark is None else f"search rule {mark.rule} ended the trial at turn {mark.turn}"


def _zero(graded: Graded, rules: Sequence[str]) -> Graded:
    """The reward 0, with the rules that are the cause and the reward that the trial had."""
    before = {} if graded.value is None else {"before_rules": graded.value}
    return Graded(0.0, {**graded.parts, **before, **{f"rule/{name}": 1.0 for name in rules}})


def _ending(
    attempt: Attempt,
    agent: AgentResult,
    turns: Sequence[Turn],
    graded: Graded,
    ended_by: str | None,
) -> _Ending:
    """Status and error, by the table above."""
    crashed = agent.end is AgentEnd.CRASHED
    cut = bool(turns) and turns[-1].status in (TurnStatus.CUT, TurnStatus.OPEN)
    log = f"; see {attempt.logs}/agent.log" if attempt.logs else ""
    if not _answered(turns):
        reason = f" ({agent.error}){log}" if agent.error else ""
        replayed = sum(turn.status is TurnStatus.CONTEXT for turn in turns)
        after = f" after the {replayed} recorded ones" if replayed else ""
        return _Ending(
            RolloutStatus.FAILED, f"the agent never had an answer from the model{after}{reason}"
        )
    if ended_by is not None:
        return _Ending(RolloutStatus.TRUNCATED, ended_by)
    if crashed and (cut or graded.value is None):
        return _Ending(RolloutStatus.FAILED, f"the agent crashed: {agent.error}{log}")
    if agent.end is not AgentEnd.EXITED:
        ended = agent.end.value.replace("_", " ")
        return _Ending(RolloutStatus.TRUNCATED, f"the agent {ended}: {agent.error}")
    if turns[-1].index in _truncated(turns):
        return _Ending(RolloutStatus.TRUNCATED, "the last answer reached the length limit")
    return _Ending(RolloutStatus.DONE)


def _with_turn_rewards(graded: Graded, posted: Sequence[Reward]) -> tuple[Graded, float]:
    """If turns or branches have rewards and the trial has none, their sum is the trial's reward;
    and the part of it that belongs to single turns."""
    given = [reward for reward in posted if reward.turn is not None]
    if graded.value is not None or not given:
        return graded, 0.0
    of_turns = sum(reward.value for reward in given if not reward.branch)
    of_branches = sum(reward.value for reward in given if reward.branch)
    return Graded(of_turns + of_branches, graded.parts), of_turns


def _check_rewards(reward: Graded, credited: Credit) -> None:
    """Checked here, where all that trains is known, because sums and products of rewards within the
    limit may be above it."""
    if reward.value is not None:
        within_limit(reward.value, "the trial's reward")
    for turn, value in credited.returns.items():
        within_limit(value, f"the return of turn {turn}")


def _answered(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.sampled]


def _turn_policies(attempt: Attempt, turns: Sequence[Turn]) -> Mapping[int, str]:
    if len(attempt.policies) < 2:
        return {}
    return {turn.index: turn.policy for turn in turns if turn.policy in attempt.policies}


def _turn_calls(turns: Sequence[Turn]) -> Mapping[int, str]:
    lines = {
        turn.index: [
            f"{call.name} {call.arguments}"[:CALL_CHARS].replace("\n", " ")
            for call in load_answer(turn.answer).tool_calls
        ]
        for turn in _answered(turns)
        if turn.answer
    }
    return {index: "\n".join(calls) for index, calls in lines.items() if calls}


def _truncated(turns: Sequence[Turn]) -> tuple[int, ...]:
    lengths = (turn for turn in _answered(turns) if turn.finish_reason is FinishReason.LENGTH)
    return tuple(turn.index for turn in lengths)


def _forks(turns: Sequence[Turn]) -> Mapping[str, int]:
    return Counter(turn.fork_cause.value for turn in turns if turn.fork_cause)


def _times_s(agent: AgentResult | None, turns: Sequence[Turn]) -> Mapping[str, float]:
    if agent is None:
        return {}
    own = (turn.duration_s or 0.0 for turn in turns if turn.status is not TurnStatus.CONTEXT)
    return {"agent": agent.wall_s, "generate": sum(own)}


def _metrics(
    attempt: Attempt, agent: AgentResult | None, turns: Sequence[Turn]
) -> Mapping[str, float]:
    statuses = Counter(turn.status for turn in turns)
    return {
        **(agent.metrics if agent else {}),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in _answered(turns)),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "cut_turns": statuses[TurnStatus.CUT] + statuses[TurnStatus.OPEN],
        "superseded_turns": statuses[TurnStatus.SUPERSEDED],
        "context_turns": statuses[TurnStatus.CONTEXT],
        "failed_attempts": attempt.earlier.failed,
        "continuations": attempt.earlier.continued,
        "diverged_continuations": attempt.earlier.diverged,
        "lost_tokens": attempt.earlier.lost_tokens,
    }
