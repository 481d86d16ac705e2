"""When a batch is full and what it holds, for any order in which episodes end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.extras.swarm.batching import Collected, select
from agent_loop.extras.swarm.config import BatchPlan, SwarmConfig
from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.wire import EpisodeState, EpisodeView
from agent_loop.producers.rollout_config import RolloutConfig

Ends = list[tuple[str, float]]
ENDS = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from([0.0, 1.0])), max_size=40)
COUNTING = st.sampled_from(["episodes", "tasks", "tasks_with_signal"])
RULES = st.sampled_from(["episodes", "tasks", "tasks_with_signal", "any_client", "all_clients"])
LEFT_OVER = st.sampled_from(["carry", "drop", "train"])
SMALL = st.integers(1, 4)


def plan_of(*, groups: int = 8, group_size: int = 8, **swarm: Any) -> BatchPlan:
    rollout = RolloutConfig(groups_per_step=groups, group_size=group_size)
    return BatchPlan(SwarmConfig.model_validate(swarm), rollout)


def ended(ends: Ends) -> list[Episode]:
    return [
        Episode(
            EpisodeView(
                episode_id=f"e{i}",
                client_id="c",
                kind="train",
                state=EpisodeState.ENDED,
                task_id=task,
                reward=reward,
            ),
            b"",
        )
        for i, (task, reward) in enumerate(ends)
    ]


@given(ENDS, RULES, SMALL, SMALL, LEFT_OVER)
@settings(max_examples=300, deadline=None)
def test_each_episode_is_in_the_batch_or_left_over_and_each_group_has_one_task(
    ends: Ends, rule: str, groups: int, size: int, left_over: str
) -> None:
    episodes = ended(ends)
    plan = plan_of(stop_rule=rule, groups=groups, group_size=size, left_over=left_over)
    collected = Collected(plan, episodes)
    collected.is_agreed = True
    selection = collected.select()
    if selection is None:
        return
    batch = [episode.episode_id for group in selection.groups for episode in group]
    left = [episode.episode_id for episode in selection.left]
    assert sorted(batch + left) == sorted(episode.episode_id for episode in episodes)
    assert all(len({e.view.task_id for e in group}) == 1 for group in selection.groups)
    if left_over == "train":
        assert left == []
    elif rule == "episodes":
        assert len(batch) == groups * size
    elif rule.startswith("tasks"):
        assert [len(group) for group in selection.groups] == [size] * groups
    if rule == "tasks_with_signal" and left_over != "train" and size > 1:
        assert all(len({e.view.reward for e in group}) > 1 for group in selection.groups)


@given(ENDS, COUNTING, SMALL, SMALL)
@settings(max_examples=200, deadline=None)
def test_full_batch_stays_full_while_more_episodes_end(
    ends: Ends, rule: str, groups: int, size: int
) -> None:
    plan = plan_of(stop_rule=rule, groups=groups, group_size=size)
    collected, full = Collected(plan), []
    for episode in ended(ends):
        collected.add(episode)
        full.append(collected.is_full)
    assert full == sorted(full)


@given(ENDS, COUNTING, SMALL, SMALL, LEFT_OVER, st.data())
@settings(max_examples=300, deadline=None)
def test_index_agrees_with_a_count_from_the_start_after_any_additions_and_removals(
    ends: Ends, rule: str, groups: int, size: int, left_over: str, data: st.DataObject
) -> None:
    plan = plan_of(stop_rule=rule, groups=groups, group_size=size, left_over=left_over)
    episodes = ended(ends)
    collected = Collected(plan, episodes)
    gone = data.draw(st.sets(st.sampled_from(episodes))) if episodes else set()
    collected.remove(gone)
    kept = [episode for episode in episodes if episode not in gone]
    again = Collected(plan, kept)
    assert list(collected) == kept
    assert (collected.is_full, collected.groups_ready) == (again.is_full, again.groups_ready)
    assert sorted(e.episode_id for e in collected.without_signal()) == sorted(
        e.episode_id for e in again.without_signal()
    )
    if rule != "episodes" and left_over != "train":
        wanted = plan_of(stop_rule=rule, groups=100, group_size=size)
        assert len(select(kept, wanted).groups) == collected.groups_ready


def test_client_rules_take_everything_once_the_clients_agree() -> None:
    collected = Collected(plan_of(stop_rule="all_clients"), ended([("a", 1.0), ("b", 0.0)]))
    assert collected.select() is None
    collected.is_agreed = True
    selection = collected.select()
    assert selection is not None
    assert [len(group) for group in selection.groups] == [1, 1]
    nothing = Collected(plan_of(stop_rule="any_client"))
    nothing.is_agreed = True
    assert nothing.select() is None


def test_full_groups_of_equal_rewards_are_found() -> None:
    plan = plan_of(stop_rule="tasks_with_signal", groups=1, group_size=2)
    collected = Collected(plan, ended([("a", 0.0), ("b", 0.0), ("a", 0.0), ("b", 1.0)]))
    assert {episode.view.task_id for episode in collected.without_signal()} == {"a"}
    trains_all = plan_of(stop_rule="tasks_with_signal", groups=1, group_size=2, left_over="train")
    assert Collected(trains_all, list(collected)).without_signal() == []
