"""Token tree → segments → trajectories, on hand-written and on random trees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop import trajectory as building
from agent_loop.errors import TrajectoryError
from agent_loop.records import Segment
from agent_loop.trajectory import build_segments, flatten
from proxy.records import ImageSpan, Turn, TurnStatus, VersionSpan
from proxy.records.images import check_images, engine_ids, image_ids
from tests.agent_loop.recorded import full_path, token_trees, turn


def tokens(segment: Segment) -> list[int]:
    return segment.ids.tolist()


def test_turns_that_extend_each_other_form_one_segment_with_trained_answers() -> None:
    turns = [turn(0, None, 0, [1, 2], [3, 4], version=5), turn(1, 0, 4, [5], [6], version=6)]
    (only,) = build_segments(turns)
    assert only.parent == -1
    assert tokens(only) == [1, 2, 3, 4, 5, 6]
    assert only.mask.tolist() == [False, False, True, True, False, True]
    assert only.logprobs.tolist() == [0, 0, -0.125, -0.25, 0, -0.125]
    assert only.versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert only.turns.tolist() == [0, 0, 0, 0, 1, 1]


def test_fork_inside_an_answer_keeps_the_shared_part_once() -> None:
    turns = [turn(0, None, 0, [1], [2, 3, 4]), turn(1, 0, 2, [5], [6])]
    root, first, second = build_segments(turns)
    assert [tokens(s) for s in (root, first, second)] == [[1, 2], [3, 4], [5, 6]]
    assert [s.parent for s in (root, first, second)] == [-1, 0, 0]
    flat = flatten((root, first, second))
    assert [t.ids.tolist() for t in flat] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [t.mask.tolist() for t in flat] == [[False, True, True, True], [False] * 3 + [True]]
    assert flat[1].logprobs.tolist() == [0, 0, 0, -0.125]
    assert flat[1].versions.tolist() == [-1, -1, -1, 0]


def test_fork_before_the_parents_own_tokens_is_attached_to_the_grandparent() -> None:
    turns = [
        turn(0, None, 0, [1, 2], [3]),
        turn(1, 0, 3, [4], [5]),
        turn(2, 1, 2, [6], [7]),
    ]
    assert [(s.parent, tokens(s)) for s in build_segments(turns)] == [
        (-1, [1, 2]),
        (0, [3, 4, 5]),
        (0, [6, 7]),
    ]


def test_siblings_with_equal_answers_are_all_trained() -> None:
    turns = [turn(0, None, 0, [1], [2]), turn(1, 0, 1, [], [2])]
    segments = build_segments(turns)
    assert sum(int(s.mask.sum()) for s in segments) == 2
    assert [s.parent for s in segments] == [-1, 0, 0]


@pytest.mark.parametrize("status", [TurnStatus.CUT, TurnStatus.SUPERSEDED, TurnStatus.OPEN])
def test_unanswered_turn_is_dropped_as_a_leaf_and_kept_as_context_within_a_path(
    status: TurnStatus,
) -> None:
    cut = turn(1, 0, 3, [4], [5, 6], status=status)
    leaf = [turn(0, None, 0, [1, 2], [3]), cut]
    assert [tokens(s) for s in build_segments(leaf)] == [[1, 2, 3]]
    within = [*leaf, turn(2, 1, 6, [7], [8])]
    (only,) = build_segments(within)
    assert tokens(only) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert only.mask.tolist() == [False, False, True, False, False, False, False, True]


def test_turns_without_credit_are_context() -> None:
    turns = [turn(0, None, 0, [1], [2]), turn(1, 0, 2, [3], [4]), turn(2, None, 0, [5], [6])]
    (only,) = build_segments(turns, untrained={0, 2})
    assert tokens(only) == [1, 2, 3, 4]
    assert only.mask.tolist() == [False, False, False, True]
    assert build_segments(turns, untrained=range(3)) == ()


def test_answers_without_log_probabilities_are_context_or_imitated_and_never_trained() -> None:
    """Those of a text-only engine, in a session of kind eval."""
    nan = np.array([np.nan], np.float32)
    turns = [_with(turn(0, None, 0, [1], [2]), logprobs=nan, versions=())]
    assert build_segments(turns, untrained={0}) == ()
    (only,) = build_segments(turns, imitated=True)
    assert only.mask.tolist() == [False, True]
    assert np.isnan(only.logprobs[1])
    assert only.versions.tolist() == [-1, -1]
    with pytest.raises(TrajectoryError, match="not finite"):
        build_segments(turns)


def _with(made: Turn, **changes: Any) -> Turn:
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "1 log-probabilities for 2"),
        ({"logprobs": np.array([0.0, np.nan], np.float32)}, "not finite"),
        ({"versions": (VersionSpan(0, 0, 1),)}, "do not cover"),
        ({"versions": (VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))}, "do not cover"),
        ({"index": 3}, "index 3"),
        ({"parent": 1}, "parent 1"),
        ({"shared_tokens": 4}, "shares 4"),
    ],
)
def test_record_that_is_not_a_token_tree_is_refused(
    change: dict[str, object], expected: str
) -> None:
    turns = [turn(0, None, 0, [1], [2, 3]), _with(turn(1, 0, 3, [4], [5, 6]), **change)]
    with pytest.raises(TrajectoryError, match=expected):
        build_segments(turns)


@pytest.mark.parametrize("counted", [-1, 1])
def test_segments_that_train_what_was_not_sampled_are_refused(
    monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    """A mask that begins a token too early or too late; the mask itself cannot tell."""
    whole = building._block

    def shifted(turn: Turn, *given: Any) -> Any:
        block, start = whole(turn, *given), len(turn.prompt_ids)
        block.mask[start - 1 if counted > 0 else start] = counted > 0
        return block

    monkeypatch.setattr(building, "_block", shifted)
    with pytest.raises(TrajectoryError, match=f"2 sampled tokens.*but {2 + counted} would be"):
        build_segments([turn(0, None, 0, [1, 7], [2, 3])])


def trained_ids(turns: Sequence[Turn]) -> list[int]:
    """The ids of the trained tokens. In a random tree every id is unique, so that an id identifies
    a sampled token."""
    return sorted(int(i) for t in turns if t.sampled for i in t.sampled_ids)


@settings(max_examples=300, deadline=None)
@given(token_trees())
def test_every_sampled_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    segments = build_segments(turns)
    in_segments = [i for s in segments for i in s.ids[s.mask].tolist()]
    assert sorted(in_segments) == trained_ids(turns)
    in_flat = [i for t in flatten(segments) for i in t.ids[t.mask].tolist()]
    assert sorted(in_flat) == trained_ids(turns)


@settings(max_examples=300, deadline=None)
@given(token_trees())
def test_every_trajectory_equals_the_engines_tokens_up_to_its_last_trained_token(
    turns: list[Turn],
) -> None:
    for trajectory in flatten(build_segments(turns)):
        last = int(trajectory.turns[-1])
        path = full_path(turns, last)
        assert trajectory.mask[-1]
        assert trajectory.ids.tolist() == path[: len(trajectory)].tolist()


@settings(max_examples=300, deadline=None)
@given(token_trees())
def test_each_trained_token_carries_its_own_logprob_version_and_turn(turns: list[Turn]) -> None:
    for segment in build_segments(turns):
        assert (segment.logprobs[~segment.mask] == 0).all()
        assert (segment.versions[~segment.mask] == -1).all()
        for at in np.flatnonzero(segment.mask):
            owner = turns[segment.turns[at]]
            position = owner.sampled_ids.tolist().index(segment.ids[at])
            version = next(s.version for s in owner.versions if s.start <= position < s.end)
            assert segment.logprobs[at] == owner.logprobs[position]
            assert segment.versions[at] == version


@settings(max_examples=200, deadline=None)
@given(token_trees(), st.data())
def test_segments_are_a_radix_tree_without_chains_or_dead_ends(
    turns: list[Turn], data: st.DataObject
) -> None:
    untrained = data.draw(st.sets(st.integers(0, len(turns) - 1)))
    segments = build_segments(turns, untrained=untrained)
    children = [0] * len(segments)
    for index, segment in enumerate(segments):
        assert segment.parent < index
        assert len(segment.ids) > 0
        if segment.parent >= 0:
            children[segment.parent] += 1
    for segment, count in zip(segments, children, strict=True):
        assert count != 1
        assert count > 1 or segment.mask[-1]
        assert not set(segment.turns[segment.mask].tolist()) & untrained


def _pictures(*names: str) -> list[ImageSpan]:
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    return [ImageSpan(1, 3, 9, digest, digest) for digest in digests]


def test_images_stay_at_their_tokens_in_every_path() -> None:
    """Two forks, each with another image of the same size after the same first one."""
    first, second, third = _pictures("a", "b", "c")
    pixels = [image_ids(each.digest, 3).tolist() for each in (first, second, third)]
    turns = [
        _with(turn(0, None, 0, [1, *pixels[0], 2], [3]), images=(first,)),
        _with(turn(1, 0, 6, [4, *pixels[1]], [5]), images=(second,)),
        _with(turn(2, 0, 6, [4, *pixels[2]], [6]), images=(third,)),
    ]
    segments = build_segments(turns)
    paths = flatten(segments)
    assert [[each.digest for each in path.images] for path in paths] == [
        [first.digest, second.digest],
        [first.digest, third.digest],
    ]
    for path in paths:
        check_images(path.ids, path.images)
        assert engine_ids(path.ids, path.images).tolist()[:9] == [1, 9, 9, 9, 2, 3, 4, 9, 9]


@pytest.mark.parametrize("lost", [(), (0,), (1,)])
def test_image_that_the_record_lacks_is_an_error(lost: tuple[int, ...]) -> None:
    first, second = _pictures("a", "b")
    ids = [1, *image_ids(first.digest, 3).tolist(), *image_ids(second.digest, 3).tolist()]
    found = [first, replace(second, offset=4)]
    images = tuple(found[n] for n in lost)
    with pytest.raises(TrajectoryError, match="image"):
        build_segments([_with(turn(0, None, 0, ids, [3]), images=images)])


def test_fork_within_an_image_is_an_error() -> None:
    (first,) = _pictures("a")
    ids = [1, *image_ids(first.digest, 3).tolist()]
    turns = [_with(turn(0, None, 0, ids, [3]), images=(first,)), turn(1, 0, 2, [4], [5])]
    with pytest.raises(TrajectoryError, match="cut it"):
        build_segments(turns)
