"""Routed experts along the token tree: each token has the row of its own path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.errors import TrajectoryError
from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments, flatten
from proxy.errors import ProxyError
from proxy.records import Ids, RoutedExperts, Turn
from proxy.records.expert_rows import routing_of
from tests.agent_loop.recorded import full_path, token_trees, turn


def rows_of(ids: Ids) -> RoutedExperts:
    """A row that depends on the token alone; ids of a drawn tree are unique."""
    return np.stack([ids, ids + 1], -1).astype(np.uint8)[:, None, :]


def with_rows(turns: list[Turn], index: int, count: int) -> Turn:
    """The turn with the rows of the `count` tokens before the last one of its path."""
    path = full_path(turns, index)
    end = max(len(path) - 1, 0)
    return replace(turns[index], routed_experts=rows_of(path[max(0, end - count) : end]))


@settings(max_examples=200, deadline=None)
@given(token_trees(), st.data())
def test_every_token_with_a_recorded_row_has_its_own(
    turns: list[Turn], data: st.DataObject
) -> None:
    recorded = [
        with_rows(turns, index, data.draw(st.integers(0, each.path_tokens)))
        if data.draw(st.booleans())
        else each
        for index, each in enumerate(turns)
    ]
    covered = set[int]()
    for index, each in enumerate(recorded):
        if each.routed_experts is not None:
            path = full_path(turns, index)[:-1]
            covered |= set(path[len(path) - len(each.routed_experts) :].tolist())
    segments = build_segments(recorded)
    task = Task("a", {})
    group = Group("g", task, [Rollout("t", task, RolloutStatus.DONE, 1.0, segments=segments)])
    (rollout,) = decode_group(encode_group(group)).rollouts
    for whole in flatten(rollout.segments):
        if whole.routing is None:
            assert not covered & set(whole.ids.tolist())
            continue
        known = whole.routing.known
        assert known.tolist() == [token in covered for token in whole.ids.tolist()]
        assert np.array_equal(whole.routing.experts[known], rows_of(whole.ids)[known])


def test_a_turns_own_row_is_kept_when_a_later_call_computed_the_token_again() -> None:
    first = replace(turn(0, None, 0, [1, 2], [3]), routed_experts=np.zeros((2, 1, 1), np.uint8))
    again = replace(turn(1, 0, 3, [4], [5]), routed_experts=np.full((4, 1, 1), 7, np.uint8))
    one, other = routing_of([first, again])
    assert one is not None
    assert other is not None
    assert one.experts[:, 0, 0].tolist() == [0, 0, 7]
    assert one.known.all()
    assert other.known.tolist() == [True, False]


def test_rows_of_several_models_in_a_session_are_refused() -> None:
    turns = [
        replace(
            turn(index, None, 0, [1, 2], [3]), routed_experts=np.zeros((2, layers, 1), np.uint8)
        )
        for index, layers in enumerate((2, 3))
    ]
    with pytest.raises(ProxyError, match=r"turn 1: .* shape \[3, 1\], and others have \[2, 1\]"):
        routing_of(turns)
    with pytest.raises(TrajectoryError, match="record the calls of several models in several"):
        build_segments(turns)
