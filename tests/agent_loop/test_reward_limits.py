"""A reward that is not a number of usual size fails its trial, with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction

import pytest

from agent_loop.errors import CreditError, RewardError
from agent_loop.records import AgentEnd, AgentResult, Graded, Rollout, Task
from agent_loop.reward_values import REWARD_LIMIT, graded, number
from agent_loop.trial.credit import CreditConfig, assign_credit
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.records import Reward, Turn
from tests.agent_loop.recorded import turn

AGENT = AgentResult(AgentEnd.EXITED)
HUGE = (1.8e308, 1e39, 3.4e38, 10**400, 10**5000, float("inf"), "1e400", Fraction(10**400, 3))


def two_turns() -> list[Turn]:
    return [turn(0, None, 0, [1], [2]), turn(1, 0, 2, [3], [4])]


def rollout(trial: str, reward: object, posted: Sequence[Reward] = ()) -> Rollout:
    value = None if reward is None else number(reward, "the verifier")
    return build_rollout(
        Attempt(trial, Task("t", {})), AGENT, two_turns(), Graded(value), posted=posted
    )


@pytest.mark.parametrize("value", HUGE, ids=[f"{n}" for n in range(len(HUGE))])
def test_reward_above_the_limit_is_refused_with_its_reason(value: object) -> None:
    for raw in (value, {"reward": value}):
        with pytest.raises(RewardError, match="verifier"):
            graded(raw, "reward", "verifier")


def test_reward_file_with_a_huge_integer_is_refused() -> None:
    with pytest.raises(RewardError, match=r"reward\.json"):
        graded(json.loads("1" + "0" * 400), "reward", "reward.json")


def test_rewards_that_are_within_the_limit_alone_and_not_together_fail_the_trial() -> None:
    each = REWARD_LIMIT * 0.75
    with pytest.raises(RewardError, match="the trial's reward"):
        rollout("a", None, [Reward("x", each, turn=0), Reward("y", each, turn=1)])
    with pytest.raises(RewardError, match="the return of turn 1"):
        rollout("a", each, [Reward("y", each, turn=1)])


def huge_share(turns: Sequence[Turn], reward: float | None) -> dict[int, int]:
    return {0: 10**400}


def large_share(turns: Sequence[Turn], reward: float | None) -> dict[int, float]:
    return {0: REWARD_LIMIT}


def test_huge_share_of_an_own_credit_function_fails_the_trial() -> None:
    with pytest.raises(CreditError, match="returned the share 1000"):
        assign_credit(two_turns(), 1.0, (), own(huge_share))
    with pytest.raises(RewardError, match="the return of turn 0"):
        build_rollout(
            Attempt("a", Task("t", {})), AGENT, two_turns(), Graded(2.0), credit=own(large_share)
        )


def own(function: object) -> CreditConfig:
    name = getattr(function, "__name__", "")
    return CreditConfig.model_validate({"function": f"{__name__}:{name}"})
