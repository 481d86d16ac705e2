"""Credit along the tree of turns: discounts by distance, and side calls by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.errors import CreditError
from agent_loop.trial.credit import CreditConfig, assign_credit, summaries
from proxy.conversation.messages import Conversation, Message, dump_answer
from proxy.conversation.recorded import dump_request
from proxy.records import ForkCause, Reward, Turn, TurnStatus
from tests.agent_loop.recorded import token_trees, turn

NEW = ForkCause.NEW_CONVERSATION


def with_side_calls() -> list[Turn]:
    """A title (0), a main conversation (1, 2, 5) and a sub-agent in between (3, 4)."""
    return [
        turn(0, None, 0, [1, 2], [3]),
        turn(1, 0, 1, [4], [5], cause=NEW),
        turn(2, 1, 3, [6], [7]),
        turn(3, 0, 1, [8], [9], cause=NEW),
        turn(4, 3, 3, [10], [11]),
        turn(5, 2, 5, [12], [13]),
    ]


def credit(turns: list[Turn], reward: float | None = 1.0, *posted: Reward, **policy: object):
    return assign_credit(turns, reward, posted, CreditConfig(**policy))


def test_discount_depends_on_the_distance_to_the_end_of_the_turns_own_chain() -> None:
    """By order of arrival, turn 2 would get 0.9³ and the sub-agent's calls 0.9² and 0.9."""
    given_ = credit(with_side_calls(), policy="all", turn_discount=0.9)
    assert given_.returns == pytest.approx({0: 1, 1: 0.81, 2: 0.9, 3: 0.9, 4: 1, 5: 1})
    assert given_.untrained == frozenset()


def test_policy_main_path_leaves_side_calls_untrained_instead_of_giving_them_0() -> None:
    given_ = credit(with_side_calls(), policy="main_path")
    assert given_.returns == {1: 1, 2: 1, 5: 1}
    assert given_.untrained == {0, 3, 4}


def test_policy_branch_credits_side_calls_with_the_reward_posted_for_them() -> None:
    sub_agent = Reward("sub", 0.5, turn=4, branch=True)
    given_ = credit(with_side_calls(), 1.0, sub_agent, policy="branch", turn_discount=0.5)
    assert given_.returns == {1: 0.25, 2: 0.5, 5: 1, 3: 0.25, 4: 0.5}
    assert given_.untrained == {0}


SUMMARY = "The first half of the files has been read, and the sum is 42 so far."


def compacted(*, own_conversation: bool) -> list[Turn]:
    """Two turns (0, 1), the summary (2) and two turns after it (3, 4). The summary is asked for at
    the end of the conversation, or in one of its own."""
    asked = turn(2, 0, 1, [20], [21], cause=NEW) if own_conversation else turn(2, 1, 5, [20], [21])
    answer = dump_answer(Message("assistant", f"<summary>\n{SUMMARY}\n</summary>"))
    begins_again = turn(3, 0, 1, [30], [31], cause=ForkCause.COMPACTION)
    quoting = Conversation([Message("user", f"This is the summary: {SUMMARY} Go on.")])
    return [
        turn(0, None, 0, [1, 2], [3]),
        turn(1, 0, 3, [4], [5]),
        replace(asked, answer=answer),
        replace(begins_again, request=dump_request(quoting, -1, None)),
        turn(4, 3, 3, [40], [41]),
    ]


@pytest.mark.parametrize("own_conversation", [False, True])
@pytest.mark.parametrize("policy", ["all", "main_path"])
def test_summary_gets_the_return_of_what_follows_it(own_conversation: bool, policy: str) -> None:
    turns = compacted(own_conversation=own_conversation)
    later = Reward("later", 0.5, turn=4)
    given_ = credit(turns, 1.0, later, policy=policy, turn_discount=0.5)
    before = {0: 0.125, 1: 0.25} if own_conversation else {0: 0.0625, 1: 0.125}
    assert given_.returns == {**before, 2: 0.25, 3: 0.5, 4: 1.5}
    assert given_.untrained == frozenset()


def test_the_benchmarks_function_leaves_out_only_the_summary() -> None:
    turns = compacted(own_conversation=True)
    function = "benchmarks/compaction/masked.py:masked"
    assert CreditConfig.model_validate({"function": function}).function is not None
    masked_ = credit(turns, function=function)
    assert masked_.untrained == {2}
    assert masked_.returns == dict.fromkeys((0, 1, 3, 4), 1.0)


def test_compaction_without_a_recorded_request_has_no_summary() -> None:
    turns = compacted(own_conversation=True)
    turns[3] = replace(turns[3], request=b"")
    assert summaries(compacted(own_conversation=True)) == {3: 2}
    assert summaries(turns) == {}


def test_reward_of_a_turn_is_credited_to_no_other_turn() -> None:
    given_ = credit(with_side_calls(), 1.0, Reward("step", -0.25, turn=2), policy="main_path")
    assert given_.returns == {1: 1, 2: 0.75, 5: 1}


def test_turns_can_have_rewards_in_a_trial_without_a_reward() -> None:
    turns = [turn(0, None, 0, [1], [2]), turn(1, 0, 2, [3], [4])]
    given_ = credit(turns, None, Reward("a", 1.0, turn=0), Reward("b", 0.5, turn=1))
    assert given_.returns == {0: 1.0, 1: 0.5}


def test_conversation_continues_after_compaction() -> None:
    turns = [
        turn(0, None, 0, [1, 2], [3]),
        turn(1, 0, 3, [4], [5]),
        turn(2, 0, 1, [6], [7], cause=ForkCause.COMPACTION),
        turn(3, 2, 3, [8], [9]),
    ]
    given_ = credit(turns, policy="main_path", turn_discount=0.5)
    assert given_.returns == {0: 0.125, 1: 0.25, 2: 0.5, 3: 1}


def test_rolled_back_branch_is_not_on_the_main_path() -> None:
    turns = [
        turn(0, None, 0, [1], [2]),
        turn(1, 0, 2, [3], [4]),
        turn(2, 0, 2, [5], [6], cause=ForkCause.ROLLED_BACK),
    ]
    assert credit(turns, policy="main_path").untrained == {1}
    assert credit(turns, policy="all", turn_discount=0.5).returns == {0: 0.5, 1: 1, 2: 1}


def test_unanswered_turns_are_skipped_in_a_chain() -> None:
    turns = [
        turn(0, None, 0, [1], [2]),
        turn(1, 0, 2, [3], [4], status=TurnStatus.CUT),
        turn(2, 1, 3, [], [5], cause=ForkCause.SIBLING),
    ]
    given_ = credit(turns, turn_discount=0.5)
    assert given_.returns == {0: 0.5, 2: 1}
    assert given_.untrained == {1}


def test_share_of_a_turn_is_its_return_for_a_trial_reward_of_1_without_posted_rewards() -> None:
    posted = Reward("step", 5.0, turn=2)
    given_ = credit(with_side_calls(), -2.0, posted, policy="all", turn_discount=0.9)
    assert given_.shares == pytest.approx({0: 1, 1: 0.81, 2: 0.9, 3: 0.9, 4: 1, 5: 1})
    assert given_.returns == pytest.approx({0: -2, 1: -1.62, 2: 3.2, 3: -1.8, 4: -2, 5: -2})


@settings(max_examples=200, deadline=None)
@given(token_trees(), st.sampled_from(["all", "main_path", "branch"]))
def test_every_turn_is_either_credited_or_untrained(turns: list[Turn], policy: str) -> None:
    given_ = credit(turns, 1.0, policy=policy)
    assert set(given_.returns) | given_.untrained == set(range(len(turns)))
    assert not set(given_.returns) & given_.untrained
    assert all(turns[index].sampled for index in given_.returns)
    assert all(value == pytest.approx(1.0) for value in given_.returns.values())


def no_share(turns: Sequence[Turn], reward: float | None) -> Mapping[int, float | None]:
    return {0: None}


def nan_share(turns: Sequence[Turn], reward: float | None) -> Mapping[int, float]:
    return {0: float("nan")}


@pytest.mark.parametrize(("function", "share"), [(no_share, "None"), (nan_share, "nan")])
def test_share_that_is_no_finite_number_is_refused(
    function: Callable[..., object], share: str
) -> None:
    settings_ = CreditConfig.model_validate({"function": f"{__name__}:{function.__name__}"})
    with pytest.raises(CreditError, match=f"returned the share {share} for turn 0"):
        assign_credit([turn(0, None, 0, [1], [2])], 1.0, (), settings_)
