"""What top-k and top-p left, from the record of a turn to the trajectory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from agent_loop.errors import AgentLoopError, TrajectoryError
from agent_loop.extras.other_trainers.trial_batch import TrialBatch, completion
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import (
    AgentEnd,
    AgentResult,
    Graded,
    Group,
    Rollout,
    RolloutStatus,
    Task,
)
from agent_loop.trajectory import build_segments, flatten
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.records import Turn
from proxy.records.alternatives import table
from tests.agent_loop.recorded import token_trees, turn


class GivenTrials:
    """A loop whose trials end with the given rollouts, one after another."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self._rollouts = rollouts

    async def run(self, task: Task, **_: Any) -> Rollout:
        return self._rollouts.pop(0)

    async def close(self) -> None: ...


LEFT: Mapping[str, Any] = {"top_k": 4, "top_p": 0.9, "alternatives": 20}


def with_left(found: Turn, *, columns: int = 20) -> Turn:
    """The turn, of which each sampled token was one of one to four: itself and some after it."""
    rows = [
        [(int(token) + n, -math.log(1 + token % 4)) for n in range(1 + int(token) % 4)]
        for token in found.sampled_ids
    ]
    return replace(found, sampling=LEFT, alternatives=table(rows, columns))


@settings(max_examples=60, deadline=None)
@given(token_trees())
def test_each_trained_token_has_the_tokens_that_were_left_where_it_was_sampled(
    turns: list[Turn],
) -> None:
    segments = build_segments([with_left(each) for each in turns])
    rollout = Rollout("t", Task("a", {}), RolloutStatus.DONE, 1.0, segments=segments)
    (back,) = decode_group(encode_group(Group("g", rollout.task, [rollout]))).rollouts
    for mine, theirs in zip(segments, back.segments, strict=True):
        assert np.array_equal(mine.kept, theirs.kept)  # type: ignore[arg-type]
    for path in flatten(back.segments):
        if not path.mask.any():
            continue
        assert path.kept is not None
        assert path.kept.shape == (len(path.ids), 20)
        for token, left in zip(path.ids[path.mask], path.kept[path.mask], strict=True):
            expected = list(range(token, token + 1 + token % 4))
            assert sorted(left[left >= 0].tolist()) == expected


def test_tokens_of_a_turn_that_is_not_trained_have_no_rows() -> None:
    turns = [with_left(turn(0, None, 0, [1, 2], [4, 5])), with_left(turn(1, 0, 4, [3], [8, 9]))]
    (path,) = flatten(build_segments(turns, untrained={0}))
    assert path.kept is not None
    assert (path.kept[:5] == -1).all()
    assert (path.kept[5:, 0] == [8, 9]).all()
    (whole,) = flatten(build_segments([turn(0, None, 0, [1, 2], [4, 5])]))
    assert whole.kept is None


@pytest.mark.parametrize("sampling", [{}, {"top_k": -1, "top_p": 0.5}, {"top_k": 30}])
def test_what_no_trainer_restricts_is_not_needed(sampling: dict[str, Any]) -> None:
    """Such as verl's own top-p, which verl's trainer does not know."""
    found = replace(turn(0, None, 0, [1], [2, 3]), sampling={**sampling, "alternatives": 20})
    assert build_segments([found])[0].kept is None


@pytest.mark.parametrize("rows", [None, [[(2, 0.0)]]])
def test_turn_without_the_record_of_what_was_left_is_not_trained(
    rows: Sequence[Sequence[tuple[int, float]]] | None,
) -> None:
    recorded = None if rows is None else table(rows, 2)
    found = replace(turn(0, None, 0, [1], [2, 3]), sampling=LEFT, alternatives=recorded)
    with pytest.raises(TrajectoryError, match="what that left is not recorded"):
        build_segments([found])
    build_segments([found], untrained={0})
    build_segments([found], imitated=True)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 50, "alternatives": 20}])
def test_answer_with_a_grammar_is_trained_only_where_what_it_left_is_recorded(
    sampling: dict[str, Any],
) -> None:
    """Also of a session that pins a greater top-k, and of an engine that reports nothing."""
    grammar = {**sampling, "structured": {"json": {}}}
    plain = turn(0, None, 0, [1, 2], [4, 5])
    bound = replace(turn(1, 0, 4, [3], [8, 9]), sampling=grammar)
    (path,) = flatten(build_segments([plain, bound]))
    assert path.ids[path.mask].tolist() == [4, 5]
    rows = table([[(8, -0.7), (7, -0.69)], [(9, -0.7)]], 20)
    (path,) = flatten(build_segments([plain, replace(bound, alternatives=rows)]))
    assert path.ids[path.mask].tolist() == [4, 5]
    rows = table([[(8, math.log(0.5)), (7, math.log(0.5))], [(9, -0.7)]], 20)
    (path,) = flatten(build_segments([plain, replace(bound, alternatives=rows)]))
    assert path.ids[path.mask].tolist() == [4, 5, 8]
    assert path.kept is not None
    assert sorted(path.kept[path.ids == 8][0].tolist())[-2:] == [7, 8]


@pytest.mark.parametrize(
    "sampling", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}], ids=str
)
def test_answer_with_penalties_of_an_earlier_record_is_not_trained(
    sampling: dict[str, Any],
) -> None:
    plain = turn(0, None, 0, [1, 2], [4, 5])
    rows = table([[(8, 0.0)], [(9, 0.0)]], 20)
    for recorded in (None, rows):
        bent = replace(turn(1, 0, 4, [3], [8, 9]), sampling=sampling, alternatives=recorded)
        (path,) = flatten(build_segments([plain, bent]))
        assert path.ids[path.mask].tolist() == [4, 5]


async def test_trainers_that_know_only_the_whole_vocabulary_get_its_tokens_alone() -> None:
    turns = [turn(0, None, 0, [1, 2], [4, 5]), with_left(turn(1, 0, 4, [3], [8, 9]))]
    task = Task("a", {"prompt": "Go."})
    mixed = Rollout("t", task, RolloutStatus.DONE, 1.0, build_segments(turns))
    assert completion(mixed).mask == [1, 1, 0, 0, 0]
    assert completion(mixed).left_out == 2
    assert completion(mixed).logprobs == [-0.125, -0.25, 0.0, 0.0, 0.0]
    bound = Rollout("t", task, RolloutStatus.DONE, 1.0, build_segments([with_left(turns[0])]))
    batch = TrialBatch(GivenTrials([bound, mixed]), [task], concurrency=1, seed=0)
    with pytest.raises(AgentLoopError, match="no token of the batch can be trained"):
        await batch.run(["Go."], step=0)
    assert await batch.run(["Go."], step=0) == [mixed]


@pytest.mark.parametrize(
    ("rows", "trained"),
    [
        ([[(2, 0.0)], []], [True, False]),
        ([[(2, 0.0)], [(4, -0.7), (5, -0.7)]], [True, False]),
        ([[(2, -0.7), (7, -1.2)], [(3, 0.0)]], [False, True]),
        ([[(2, math.nan)], [(3, 0.0)]], [False, True]),
        ([[(2, math.log(1 - 1e-6))], [(3, math.log(1 - 1e-4))]], [True, False]),
        ([[], []], [False, False]),
    ],
)
def test_token_of_which_not_all_that_was_left_is_recorded_is_not_trained(
    rows: Sequence[Sequence[tuple[int, float]]], trained: Sequence[bool]
) -> None:
    found = replace(turn(0, None, 0, [1], [2, 3]), sampling=LEFT, alternatives=table(rows, 2))
    segments = build_segments([found])
    found_trained = [int(token) for s in segments for token in s.ids[s.mask]]
    assert found_trained == [token for token, each in zip((2, 3), trained, strict=True) if each]
    for segment in segments:
        assert (segment.logprobs[~segment.mask] == 0).all()
        assert (segment.versions[~segment.mask] == -1).all()
    agent = AgentResult(AgentEnd.EXITED)
    attempt = Attempt("t", Task("a", {}))
    rollout = build_rollout(attempt, agent, [found], Graded(1.0))
    assert rollout.metrics["tied_tokens"] == 2 - sum(trained)
    assert rollout.sampled_tokens == sum(trained)


def test_top_k_records_what_it_leaves() -> None:
    pinned = RolloutConfig(top_p=0.9, top_k=10, alternatives=3).pinned
    assert (pinned["top_p"], pinned["top_k"], pinned["alternatives"]) == (0.9, 10, 20)
    whole = RolloutConfig().pinned
    assert (whole["top_p"], whole["top_k"]) == (1.0, -1)
    assert "alternatives" not in whole
