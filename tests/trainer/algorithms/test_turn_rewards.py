"""Rewards that were posted for single turns, from the session to the advantages of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_loop.records import AgentEnd, AgentResult, Graded, Group, Rollout, Task
from agent_loop.trial.credit import CreditConfig
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.records import Reward
from tests.agent_loop.recorded import turn
from trainer import fit
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import build_batch
from trainer.learning.policy_parts import parts_of

TASK = Task("t", {})
COMPARING = ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "opo", "gpg"]


def trial(name: str, own: Sequence[float], reward: float | None = None, **credit: Any) -> Rollout:
    """A trial of one chain of turns with these rewards; `reward` is that of the trial itself."""
    turns = [turn(0, None, 0, [1], [2])]
    turns += [turn(n, n - 1, 2 * n, [1], [2]) for n in range(1, len(own))]
    posted = [Reward(f"turn {n}", value, turn=n) for n, value in enumerate(own) if value]
    return build_rollout(
        Attempt(name, TASK),
        AgentResult(AgentEnd.EXITED),
        turns,
        Graded(reward),
        posted=posted,
        credit=CreditConfig.model_validate(credit),
    )


def advantages_of(group: Sequence[Rollout], **settings: Any) -> list[list[float]]:
    """The advantage of each turn of each rollout; a turn is one token."""
    batch = build_batch([Group("g", TASK, group)])
    Algorithm(AlgorithmConfig.model_validate(settings)).compute_advantages(batch)
    assert batch.advantages is not None
    owners = range(batch.num_rollouts)
    return [batch.advantages[batch.rollout == owner].tolist() for owner in owners]


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("name", COMPARING)
def test_punished_turn_of_a_long_trial_is_not_reinforced_by_the_rewards_of_its_other_turns(
    name: str, discount: float
) -> None:
    group = [
        trial("long", [-1.0, 3.0, -2.0, 4.0], turn_discount=discount),
        trial("punished", [0.0, -1.0], turn_discount=discount),
        trial("rewarded", [0.0, 1.0], turn_discount=discount),
    ]
    assert [rollout.reward for rollout in group] == [4.0, -1.0, 1.0]
    long, punished, _ = advantages_of(group, advantage=name)
    assert long[:2] == [0.0, 0.0]  # no other trial has a turn at this distance to its end
    assert long[2] < 0 < long[3]
    assert punished[1] < 0


def test_length_is_penalised_also_where_only_turns_have_rewards() -> None:
    settings = {"overlong": {"max_tokens": 2, "buffer_tokens": 1}}
    (short,), (first, second) = advantages_of(
        [trial("short", [1.0]), trial("long", [0.0, 1.0])], advantage="dr_grpo", reward=settings
    )
    assert (short, first, second) == (0.5, -0.5, -0.5)


@pytest.mark.parametrize("advantage", [{"name": "pass_at_k", "k": 1}, {"name": "accepted"}])
def test_sum_of_the_rewards_of_turns_is_the_reward_that_a_threshold_is_compared_with(
    advantage: dict[str, Any],
) -> None:
    group = [trial("right", [0.25, 0.5]), trial("wrong", [0.25])]
    right, (wrong,) = advantages_of(group, advantage=advantage)
    assert right[0] == right[1] > 0 >= wrong


@pytest.mark.parametrize("reward", [None, 1.0])
@pytest.mark.parametrize("name", COMPARING)
def test_group_of_equal_sums_is_trained_if_rewards_of_its_turns_differ(
    name: str, reward: float | None
) -> None:
    group = [trial("early", [1.0, 0.0], reward), trial("late", [0.0, 1.0], reward)]
    assert has_signal(group, name)
    assert not Group("g", TASK, group).uniform
    assert advantages_of(group, advantage=name)[0][0] > 0


@pytest.mark.parametrize("name", COMPARING)
def test_group_has_no_signal_if_the_turns_that_are_compared_have_equal_rewards(name: str) -> None:
    group = [
        trial("a", [0.25, 0.5], 1.0, turn_discount=0.9),
        trial("b", [0.25, 0.5], 1.0, turn_discount=0.9),
        trial("c", [0.75, 0.25, 0.5], 1.0, turn_discount=0.9),
    ]
    assert not has_signal(group, name)
    assert Group("g", TASK, group).uniform
    assert not any(map(any, advantages_of(group, advantage=name)))


GROUP_BASELINES = [name for name in COMPARING if name != "reinforce++"]


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_rewards_of_the_turns_of_another_policy_are_no_signal(name: str) -> None:
    """The second turn is of the policy that the other batch of a run with two policies trains."""
    own = [
        replace(trial(each, [0.5, reward]), turn_policies={0: "planner", 1: "coder"})
        for each, reward in (("a", 0.0), ("b", 1.0))
    ]
    group = Group("g", TASK, own)
    assert has_signal(own, name)
    (planner,), (coder,) = parts_of([group], "planner"), parts_of([group], "coder")
    assert not has_signal(planner.rollouts, name)
    assert has_signal(coder.rollouts, name)
    assert not any(map(any, advantages_of(planner.rollouts, advantage=name)))


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_reward_of_a_turn_that_no_other_trial_has_is_no_signal(name: str) -> None:
    group = [trial("short", [0.5]), trial("long", [1.0, 0.5])]
    assert not has_signal(group, name)
    assert not any(map(any, advantages_of(group, advantage=name)))


@pytest.mark.parametrize("name", ["pass_at_k", "tree"])
def test_rewards_of_turns_are_no_signal_for_an_estimator_that_ignores_them(name: str) -> None:
    assert not has_signal([trial("early", [1.0, 0.0], 1.0), trial("late", [0.0, 1.0], 1.0)], name)


def has_signal(group: Sequence[Rollout], name: str) -> bool:
    """Whether `groups: with_signal` trains the group."""
    config = AlgorithmConfig.model_validate({"advantage": name, "groups": "with_signal"})
    batch = build_batch([Group("g", TASK, group)])
    return len(Algorithm(config).trained_sequences(batch)) == len(batch.sequences)


@pytest.mark.parametrize("groups", ["all", "with_signal"])
@pytest.mark.parametrize("name", ["reinforce++", "accepted"])
def test_advantages_that_are_not_trained_are_no_signal(name: str, groups: str) -> None:
    """Each task was always solved or never, which tells tasks apart, and answers of none."""
    config = AlgorithmConfig.model_validate({"advantage": name, "groups": groups})
    solved = [Group("a", TASK, [trial("a1", [0.0], 1.0), trial("a2", [0.0], 1.0)])]
    never = [Group("b", TASK, [trial("b1", [0.0], 0.0), trial("b2", [0.0], 0.0)])]
    metrics = Algorithm(config).compute_advantages(build_batch([*solved, *never]))
    assert fit.has_signal(metrics) is (groups == "all")


def test_reward_of_a_trial_counts_beside_those_of_its_turns() -> None:
    group = [trial("right", [0.0, 0.5], 1.0), trial("wrong", [0.0, 0.0], 0.0)]
    right, wrong = advantages_of(group, advantage="dr_grpo")
    assert right == [0.5, 0.75]
    assert wrong == [-0.5, -0.75]
