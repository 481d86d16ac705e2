"""Exports contain every sampled token exactly once, for every tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.extras.export.protocol import Row
from proxy.extras.export.registry import FORMATS, open_format
from proxy.records import Turn, TurnStatus
from proxy.records.routed_experts import load_text
from proxy.token_tree.sampled_paths import sampled_paths
from tests.agent_loop.recorded import full_path
from tests.agent_loop.recorded import turn as a_turn
from tests.proxy.extras.export.trees import a_sample, recorded_trees
from tests.proxy.records.test_expert_rows import rows_of, with_rows

Trained = Callable[[Row], Iterable[tuple[int, float | None]]]


def pick(ids: str, mask: str, logprobs: str | None) -> Trained:
    """The tokens that `mask` marks, with their log-probabilities."""

    def trained(row: Row) -> Iterable[tuple[int, float | None]]:
        given = row[logprobs] if logprobs else [None] * len(row[ids])
        assert len(row[ids]) == len(row[mask]) == len(given)
        return [(t, p) for t, m, p in zip(row[ids], row[mask], given, strict=True) if m]

    return trained


def of_sft(row: Row) -> Iterable[tuple[int, float | None]]:
    assert len(row["labels"]) == len(row["input_ids"])
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
    return [(label, None) for label in row["labels"] if label != -100]


def of_tinker(row: Row) -> Iterable[tuple[int, float | None]]:
    inputs = {name: tensor["data"] for name, tensor in row["loss_fn_inputs"].items()}
    (chunk,) = row["model_input"]["chunks"]
    assert {len(chunk["tokens"])} == {len(values) for values in inputs.values()}
    assert chunk["tokens"][1:] == inputs["target_tokens"][:-1]
    return pick("target_tokens", "advantages", "logprobs")(inputs)


def of_atif(row: Row) -> Iterable[tuple[int, float | None]]:
    for step in row["steps"]:
        if metrics := step.get("metrics"):
            assert not step.get("is_copied_context")
            yield from zip(metrics["completion_token_ids"], metrics["logprobs"], strict=True)


TRAINED: dict[str, Trained] = {
    "tokens": pick("ids", "sampled", "logprobs"),
    "sft": of_sft,
    "trl": pick("completion_ids", "env_mask", "logprobs"),
    "verl": pick("response_ids", "response_mask", "response_logprobs"),
    "prime-rl": pick("token_ids", "mask", "logprobs"),
    "tinker": of_tinker,
    "skyrl": pick("response_ids", "loss_masks", "rollout_logprobs"),
    "atif": of_atif,
}


def test_every_format_with_tokens_is_tested_here() -> None:
    assert set(TRAINED) == set(FORMATS) - {"messages", "dpo"}


@pytest.mark.parametrize("name", TRAINED)
def test_every_sampled_token_is_exported_exactly_once(name: str) -> None:
    form = open_format(name)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recorded_trees())
    def check(turns: list[Turn]) -> None:
        exported: Counter[int] = Counter()
        for row in form.rows([a_sample(turns)]):
            for token, logprob in TRAINED[name](row):
                exported[token] += 1
                assert logprob is None or logprob == recorded_logprob(turns, token)
        done = [turn for turn in turns if turn.status is TurnStatus.DONE]
        assert exported == Counter(t for turn in done for t in turn.sampled_ids.tolist())

    check()


def recorded_logprob(turns: list[Turn], token: int) -> float:
    """The tree's token ids are all different."""
    (found,) = [
        turn.logprobs[turn.sampled_ids.tolist().index(token)]
        for turn in turns
        if token in turn.sampled_ids
    ]
    return float(found)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("trl", ("prompt_ids", "completion_ids")),
        ("verl", ("prompt_ids", "response_ids")),
        ("skyrl", ("prompt_token_ids", "response_ids")),
    ],
)
def test_prompt_and_response_are_the_recorded_path_up_to_the_last_token_to_train(
    name: str, columns: tuple[str, str]
) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recorded_trees())
    def check(turns: list[Turn]) -> None:
        whole = [p for p in sampled_paths(turns) if p.sampled.any()]
        rows = list(open_format(name).rows([a_sample(turns)]))
        assert len(rows) == len(whole)
        for row, path in zip(rows, whole, strict=True):
            ids = row[columns[0]] + row[columns[1]]
            assert ids == path.ids[: np.flatnonzero(path.sampled)[-1] + 1].tolist()
            assert row[columns[0]] == path.ids[: np.flatnonzero(path.sampled)[0]].tolist()

    check()


def test_versions_and_temperatures_are_those_of_the_sampling_turn() -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recorded_trees())
    def check(turns: list[Turn]) -> None:
        for path in sampled_paths(turns):
            assert path.ids.tolist() == full_path(turns, path.turns[-1]).tolist()
            for token, version in zip(
                path.ids[path.sampled], path.versions[path.sampled], strict=True
            ):
                (turn,) = [t for t in turns if token in t.sampled_ids]
                at = turn.sampled_ids.tolist().index(token)
                assert [s.version for s in turn.versions if s.start <= at < s.end] == [version]
            assert (path.versions[~path.sampled] == -1).all()

    check()


def test_answer_is_exported_if_the_next_call_forks_inside_its_prompt() -> None:
    turns = [a_turn(0, None, 0, [1, 2, 3], [4, 5]), a_turn(1, 0, 2, [6], [7])]
    rows: list[Any] = list(open_format("tokens").rows([a_sample(turns)]))
    assert [row["ids"] for row in rows] == [[1, 2, 3, 4, 5], [1, 2, 6, 7]]
    assert [row["sampled"] for row in rows] == [
        [False, False, False, True, True],
        [False, False, False, True],
    ]


def test_each_token_of_a_path_is_exported_with_its_own_experts() -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recorded_trees(), st.data())
    def check(turns: list[Turn], data: st.DataObject) -> None:
        recorded = [
            with_rows(turns, turn.index, data.draw(st.integers(1, turn.path_tokens)))
            for turn in turns
        ]
        for row in open_format("tokens").rows([a_sample(recorded)]):
            if row["routed_experts"] is None:  # of a token that nothing follows
                assert row["routed"] is None
                assert len(row["ids"]) == 1
                continue
            ids, known = np.array(row["ids"]), np.array(row["routed"])
            experts = load_text(row["routed_experts"])
            assert experts.dtype == np.uint8
            assert np.array_equal(experts[known], rows_of(ids)[known])
        for row in open_format("verl").rows([a_sample(recorded)]):
            path = np.array(row["prompt_ids"] + row["response_ids"])
            if row["routed_experts"] is not None:
                assert row["routed_experts"] == rows_of(path)[:-1].tolist()

    check()


def test_verl_gets_experts_only_if_every_token_has_them() -> None:
    turns = [a_turn(0, None, 0, [1, 2], [3]), a_turn(1, 0, 3, [4], [5])]
    complete = [with_rows(turns, 0, 2), with_rows(turns, 1, 2)]
    (row,) = open_format("verl").rows([a_sample(complete)])
    assert row["routed_experts"] == rows_of(np.array([1, 2, 3, 4])).tolist()
    for lacking in ([complete[0], turns[1]], turns):
        (row,) = open_format("verl").rows([a_sample(lacking)])
        assert row["routed_experts"] is None
    (row,) = open_format("tokens").rows([a_sample([complete[0], turns[1]])])
    assert row["routed"] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured": {"json": {}}},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["trl", "verl", "prime-rl", "tinker", "skyrl"])
def test_token_from_a_part_of_the_vocabulary_is_marked_for_no_trainer(
    name: str, sampling: dict[str, Any]
) -> None:
    """Its log-probability is not the one that the trainer computes."""
    plain = a_turn(0, None, 0, [1, 2], [4, 5])
    bound = replace(a_turn(1, 0, 4, [3], [8, 9]), sampling=sampling)
    last = replace(a_turn(2, 1, 7, [6], [7]), sampling={"top_k": -1, "top_p": 1.0, "min_p": 0.0})
    rows = list(open_format(name).rows([a_sample([plain, bound, last])]))
    assert [token for row in rows for token, _ in TRAINED[name](row)] == [4, 5, 7]
    (row,) = open_format("tokens").rows([a_sample([plain, bound, last])])
    restricted = [t for t, r in zip(row["ids"], row["restricted"], strict=True) if r]
    assert restricted == [8, 9]
    (row,) = open_format("sft").rows([a_sample([plain, bound, last])])
    assert [token for token, _ in of_sft(row)] == [4, 5, 8, 9, 7]  # needs no probabilities
