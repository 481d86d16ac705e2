"""When a batch is full and what it holds, for any order of ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.swarm.batching import SwarmSettings, refusal, select
from agent_loop.swarm.wire import EpisodeState, EpisodeView

Ends = list[tuple[str, float]]
ENDS = st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from([0.0, 1.0])), max_size=40)
RULES = st.sampled_from(["episodes", "tasks", "tasks_with_signal", "any_client", "all_clients"])
SMALL = st.integers(1, 4)


def ended(ends: Ends) -> list[EpisodeView]:
    return [
        EpisodeView(
            episode_id=f"e{i}",
            client_id="c",
            kind="train",
            state=EpisodeState.ENDED,
            task_id=task,
            reward=reward,
        )
        for i, (task, reward) in enumerate(ends)
    ]


@given(ENDS, RULES, SMALL, SMALL, st.sampled_from(["carry", "drop", "train"]))
@settings(max_examples=300, deadline=None)
def test_each_episode_is_in_the_batch_or_left_over_and_groups_are_of_one_task(
    ends: Ends, rule: str, groups: int, size: int, left_over: str
) -> None:
    episodes = ended(ends)
    config = SwarmSettings.model_validate(
        {"stop_rule": rule, "groups": groups, "group_size": size, "left_over": left_over}
    )
    selection = select(episodes, config, clients={"c"}, agreed={"c"})
    if selection is None:
        return
    batch = [episode.episode_id for group in selection.groups for episode in group]
    left = [episode.episode_id for episode in selection.left]
    assert sorted(batch + left) == sorted(episode.episode_id for episode in episodes)
    assert all(len({episode.task_id for episode in group}) == 1 for group in selection.groups)
    if left_over == "train":
        assert left == []
    elif rule == "episodes":
        assert len(batch) == groups * size
    elif rule.startswith("tasks"):
        assert [len(group) for group in selection.groups] == [size] * groups
    if rule == "tasks_with_signal" and left_over != "train" and size > 1:
        assert all(len({episode.reward for episode in group}) > 1 for group in selection.groups)


@given(ENDS, st.sampled_from(["episodes", "tasks", "tasks_with_signal"]), SMALL, SMALL)
@settings(max_examples=200, deadline=None)
def test_what_is_full_stays_full_as_more_end(ends: Ends, rule: str, groups: int, size: int) -> None:
    config = SwarmSettings.model_validate({"stop_rule": rule, "groups": groups, "group_size": size})
    full = [select(ended(ends[:n]), config) is not None for n in range(len(ends) + 1)]
    assert full == sorted(full)


def test_clients_agree() -> None:
    episodes = ended([("a", 1.0), ("b", 0.0)])
    anyone = SwarmSettings(stop_rule="any_client")
    everyone = SwarmSettings(stop_rule="all_clients")
    clients = {"c1", "c2"}
    assert select(episodes, anyone, clients=clients, agreed=set()) is None
    assert select(episodes, anyone, clients=clients, agreed={"c1"}) is not None
    assert select(episodes, everyone, clients=clients, agreed={"c1"}) is None
    assert select(episodes, everyone, clients=clients, agreed=clients | {"gone"}) is not None
    assert select([], anyone, clients=clients, agreed={"c1"}) is None


def test_tasks_and_sources_get_no_more_than_their_share() -> None:
    config = SwarmSettings(groups=2, group_size=2, mix={"easy": 3, "hard": 1}, max_open=3)
    one = ended([("a", 1.0)])

    def why(task: str | None, source: str, open_: list[EpisodeView]) -> str | None:
        return refusal(task_id=task, source=source, open_=open_, ended=one, settings=config)

    for episode in one:
        episode.source = "hard"
    assert why("b", "easy", []) is None
    assert "its share of a batch is 1" in str(why("b", "hard", []))
    assert "its share of a batch is 0" in str(why("b", "other", []))
    same = ended([("a", 0.0)])
    same[0].source = "easy"
    assert "its group takes 2" in str(why("a", "easy", same))
    assert "max_open is 3" in str(why("b", "easy", ended([("x", 0), ("y", 0), ("z", 0)])))
