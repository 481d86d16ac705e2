"""Recorded sessions as counts of tokens: `benchmarks.train.capture` and what is made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agent_loop.records import Trajectory
from agent_loop.trajectory import flatten
from benchmarks.train.capture import counted
from benchmarks.train.workloads import SESSIONS, SESSIONS_FILE, Node, Recorded, make_groups
from trainer.batch import Batch, build_batch
from trainer.rows.prefix_tree import Forest, divide


def path(ids: list[int], mask: list[int]) -> Trajectory:
    size = len(ids)
    return Trajectory(
        ids=np.array(ids, np.int32),
        mask=np.array(mask, np.bool_),
        logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        turns=np.zeros(size, np.int32),
    )


TRIALS = (
    (path([1, 2, 3, 4], [0, 0, 1, 1]), path([1, 2, 9], [0, 0, 1])),
    (path([1, 2, 3, 5, 6], [0, 0, 1, 0, 1]),),
)


def test_trials_are_counted_as_one_tree() -> None:
    nodes, ends = counted(TRIALS)
    assert nodes == [
        Node(-1, (2,)),
        Node(0, (0, 1)),
        Node(1, (0, 1)),
        Node(1, (1, 1)),
        Node(0, (0, 1)),
    ]
    assert ends == [[2, 4], [3]]


def batch_of(recorded: Recorded) -> Batch:
    return build_batch(make_groups(recorded, 1024))


def test_groups_of_a_record_have_its_lengths_sampled_tokens_and_shared_tokens() -> None:
    nodes, ends = counted(TRIALS)
    recorded = Recorded(tuple(nodes), tuple(map(tuple, ends)))
    (group,) = make_groups(recorded, 1024)
    made = [flatten(rollout.segments) for rollout in group.rollouts]
    assert counted(made) == (nodes, ends)
    batch = batch_of(recorded)
    assert Forest.of(batch, range(len(batch.sequences))).tokens == sum(map(_size, nodes))


def _size(node: Node) -> int:
    return sum(node.runs)


def test_groups_share_what_all_trials_begin_with_and_nothing_else() -> None:
    nodes, ends = counted(TRIALS)
    one = Recorded(tuple(nodes), tuple(map(tuple, ends)), groups=3)
    batch = batch_of(one)
    tree = Forest.of(batch, range(len(batch.sequences))).tokens
    assert tree == _size(nodes[0]) + 3 * sum(map(_size, nodes[1:]))


def test_shorter_sessions_keep_every_run() -> None:
    node = Node(-1, (0, 1, 80, 3))
    assert Recorded((node,), ()).shorter(8).nodes == (Node(-1, (0, 1, 10, 1)),)


def test_captures_are_numbers_only() -> None:
    for each in json.loads(SESSIONS_FILE.read_text(encoding="utf-8")).values():
        assert set(each) == {"version", "nodes", "trials"}
        for row in (*each["nodes"], *each["trials"]):
            assert all(type(number) is int for number in row)


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 65536])
@pytest.mark.parametrize("name", SESSIONS)
def test_each_token_of_an_agents_sessions_is_trained_once(name: str, tokens: int) -> None:
    """Tokens computed ÷ tree ≤ 1.05 at any size of micro-batch."""
    batch = batch_of(SESSIONS[name])
    tree = Forest.of(batch, range(len(batch.sequences))).tokens
    rows = divide(batch, max_tokens=tokens, share_prefixes=True, in_pieces=True)
    trained = [sum(unit.tokens for unit in row.units) for row in rows if not row.reads_only]
    assert sum(trained) <= 1.05 * tree
    assert max(trained) <= tokens
