"""Reported rewards, and weighted sums in which a missing part does not count as 0."""

from __future__ import annotations

import pytest

from agent_loop.errors import RewardError
from agent_loop.records import NO_REWARD, AgentEnd, AgentResult, FinishedTrial, Graded
from agent_loop.rewards.combined import CombinedReward, Weighted
from agent_loop.rewards.reported import LauncherReward, PostedReward
from proxy.records import Reward
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished


class Fixed:
    def __init__(self, result: Graded | RewardError) -> None:
        self.result = result
        self.closed = False

    async def grade(self, finished: FinishedTrial) -> Graded:
        if isinstance(self.result, RewardError):
            raise self.result
        return self.result

    async def close(self) -> None:
        self.closed = True


async def test_posted_rewards_of_the_trial_are_summed_without_those_of_turns(
    make_trial: MakeTrial,
) -> None:
    rewards = [Reward("a", 1.0, {"x": 0.5}), Reward("b", -0.25), Reward("step", 9.0, turn=0)]
    result = await PostedReward().grade(finished(make_trial(), rewards=rewards))
    assert result == Graded(0.75, {"a": 1.0, "a.x": 0.5, "b": -0.25})


async def test_trial_without_posted_rewards_has_no_reward(make_trial: MakeTrial) -> None:
    assert await PostedReward().grade(finished(make_trial())) == NO_REWARD


async def test_launcher_reward_is_the_reward_in_the_agents_result(make_trial: MakeTrial) -> None:
    agent = AgentResult(AgentEnd.EXITED, reward=0.0, reward_parts={"a": 1.0})
    result = await LauncherReward().grade(finished(make_trial(), agent=agent))
    assert result == Graded(0.0, {"a": 1.0})


async def test_sum_is_weighted_and_keeps_its_parts_by_source(
    make_trial: MakeTrial,
) -> None:
    sources = {
        "tests": Weighted(Fixed(Graded(1.0, {"reward": 1.0, "speed": 0.5}))),
        "style": Weighted(Fixed(Graded(0.5)), 0.2),
    }
    combined = CombinedReward(sources)
    result = await combined.grade(finished(make_trial()))
    assert result.value == pytest.approx(1.1)
    assert result.parts == {
        "tests": 1.0, "tests.reward": 1.0, "tests.speed": 0.5, "style": 0.5,
    }  # fmt: skip
    await combined.close()
    assert all(weighted.source.closed for weighted in sources.values())  # type: ignore[attr-defined]


async def test_sum_with_a_missing_part_gives_no_reward(make_trial: MakeTrial) -> None:
    sources = {"a": Weighted(Fixed(Graded(1.0))), "b": Weighted(Fixed(NO_REWARD))}
    result = await CombinedReward(sources).grade(finished(make_trial()))
    assert result == Graded(None, {"a": 1.0})


async def test_sum_with_a_part_that_raises_raises(make_trial: MakeTrial) -> None:
    sources = {"a": Weighted(Fixed(Graded(1.0))), "b": Weighted(Fixed(RewardError("broken")))}
    with pytest.raises(RewardError, match="broken"):
        await CombinedReward(sources).grade(finished(make_trial()))
