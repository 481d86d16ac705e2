"""Advantages of turns in trees of rollouts, compared with exact values in a small Markov world."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent_loop.records import Group, Rollout, Task
from tests.trainer.algorithms.test_advantages import advantages_of, trial
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.algorithms.turn_values import TreePart, continuation_advantages, from_others
from trainer.batch import build_batch

TURNS = 4
STATES = 3
CHILDREN = 3
TREES = 3000


class World:
    """A chain of `TURNS` turns over `STATES` states; a success depends on the last state alone."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.moves = random.dirichlet(np.full(STATES, 0.5), (TURNS, STATES))
        self.success = np.array([0.05, 0.5, 0.9])
        self.values = np.zeros((TURNS + 1, STATES))
        """`[turn, state]`, the exact value of each state after so many turns."""
        self.values[TURNS] = self.success
        for turn in reversed(range(TURNS)):
            self.values[turn] = self.moves[turn] @ self.values[turn + 1]

    def play(self, turn: int = 0, state: int = 0) -> tuple[list[int], float]:
        """The states from `turn` on, beginning with `state`, and the reward."""
        states = [state]
        for at in range(turn, TURNS):
            states.append(int(self.random.choice(STATES, p=self.moves[at, states[-1]])))
        return states, float(self.random.random() < self.success[states[-1]])


def tree(world: World, nodes: tuple[int, ...]) -> tuple[list[int], list[float], list[int]]:
    """A trunk and its branches after each turn of `nodes`: the trunk's states, the rewards of the
    trunk (first) and of the branches, and the turn after which each one branches."""
    states, reward = world.play()
    rewards, turns = [reward], [0]
    for turn in nodes:
        for _ in range(CHILDREN):
            rewards.append(world.play(turn, states[turn])[1])
            turns.append(turn)
    return states, rewards, turns


def advantages_of_tree(rewards: list[float], turns: list[int]) -> dict[TreePart, float]:
    trunk = [-1] + [0] * (len(rewards) - 1)
    return continuation_advantages(rewards, turns, trunk, turns)


def assert_is_mean(errors: list[float]) -> None:
    """The mean is 0 within 4 standard errors."""
    error = np.std(errors, ddof=1) / np.sqrt(len(errors))
    assert abs(np.mean(errors)) < 4 * error


@pytest.mark.parametrize("nodes", [(1, 2, 3), (1, 3), (2,)])
def test_advantages_are_unbiased_and_nearer_to_the_exact_ones_than_the_reward(
    nodes: tuple[int, ...],
) -> None:
    world = World(np.random.default_rng(3))
    ends = [*nodes[1:], TURNS]
    errors: dict[int, list[float]] = {node: [] for node in nodes}
    by_reward: dict[int, list[float]] = {node: [] for node in nodes}
    of_branches: list[float] = []
    for _ in range(TREES):
        states, rewards, turns = tree(world, nodes)
        found = advantages_of_tree(rewards, turns)
        for node, end in zip(nodes, ends, strict=True):
            before = world.values[node, states[node]]
            exact = world.values[end, states[end]] - before
            errors[node].append(found[TreePart(0, node)] - exact)
            by_reward[node].append(rewards[0] - before - exact)
        for rollout in range(1, len(rewards)):
            value = world.values[turns[rollout], states[turns[rollout]]]
            of_branches.append(found[TreePart(rollout, 0)] - (rewards[rollout] - value))
    for node in nodes:
        assert_is_mean(errors[node])
        if node != nodes[-1]:
            assert np.mean(np.square(errors[node])) < np.mean(np.square(by_reward[node]))
    assert_is_mean(of_branches)


def test_tree_of_two_levels_matches_values_by_hand() -> None:
    """Trunk 0 branches after turn 1 (1, 2) and after turn 3 (3); rollout 1 branches itself (4)."""
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0]
    found = continuation_advantages(
        rewards, group=[0, 1, 1, 2, 3], trunk=[-1, 0, 0, 0, 1], turn=[0, 1, 1, 3, 2]
    )
    # After turn 3: (1 + 0) / 2. After turn 2 of rollout 1: (0 + 1) / 2.
    assert found == {
        TreePart(0, 3): 1.0,
        TreePart(3, 0): -1.0,
        TreePart(1, 2): -1.0,
        TreePart(4, 0): 1.0,
        TreePart(0, 1): 0.5 - (0.5 + 0.0) / 2,
        TreePart(1, 0): 0.5 - (0.5 + 0.0) / 2,
        TreePart(2, 0): 0.0 - (0.5 + 0.5) / 2,
        TreePart(0, 0): 0.0,
    }


def test_equal_values_give_exactly_0() -> None:
    found = advantages_of_tree([0.1] * 7, [0, 1, 1, 1, 2, 2, 2])
    assert set(found.values()) == {0.0}
    assert from_others([0.1, 0.1, 0.1]) == [0.0] * 3
    assert from_others([0.7]) == [0.0]


def branch(name: str, of: str, turn: int, reward: float, turns: int) -> Rollout:
    """A branch that trains the turns from `turn` on."""
    whole = trial(name, reward, turns)
    (segment,) = whole.segments
    own = segment.mask & (segment.turns >= turn)
    segments = (replace(segment, mask=own),)
    return replace(whole, prefix=f"{of}@{turn}", segments=segments)


def test_trained_turns_get_the_advantage_of_their_part_of_the_tree() -> None:
    rollouts = [
        trial("trunk", 1.0, 4),
        trial("other", 0.0, 2),
        branch("b1", "trunk", 2, 0.0, 3),
        branch("b2", "trunk", 2, 0.0, 4),
    ]
    batch = build_batch([Group("g", Task("t", {}), rollouts)])
    got = advantages_of(batch, "tree")
    by_turn = {
        (batch.trial_ids[int(r)], int(t)): a
        for r, t, a in zip(batch.rollout, batch.turns, got, strict=True)
    }
    third = pytest.approx(1 / 3)
    assert by_turn == {
        ("trunk", 0): third,
        ("trunk", 1): third,
        ("trunk", 2): 1.0,
        ("trunk", 3): 1.0,
        ("other", 0): pytest.approx(-1 / 3),
        ("other", 1): pytest.approx(-1 / 3),
        ("b1", 2): -0.5,
        ("b2", 2): -0.5,
        ("b2", 3): -0.5,
    }


@pytest.mark.parametrize(
    ("trunk_reward", "trained"), [(1.0, ["trunk", "b1", "b2", "c1"]), (0.0, [])]
)
def test_rollouts_that_differ_from_their_branches_only_have_signal(
    trunk_reward: float, trained: list[str]
) -> None:
    """All branches have one reward; `c1` branches from a branch, and another tree is uniform."""
    rollouts = [
        trial("trunk", trunk_reward, 4),
        branch("b1", "trunk", 2, 0.0, 4),
        branch("b2", "trunk", 2, 0.0, 3),
        branch("c1", "b1", 3, 0.0, 4),
    ]
    flat = [trial("flat", 0.1, 4), branch("f1", "flat", 2, 0.1, 3)]
    groups = [Group("g", Task("t", {}), rollouts), Group("f", Task("t", {}), flat)]
    batch = build_batch(groups)
    algorithm = Algorithm(AlgorithmConfig.model_validate({"preset": "dapo", "advantage": "tree"}))
    metrics = algorithm.compute_advantages(batch)
    owners = batch.sequence_rollout[algorithm.trained_sequences(batch)].tolist()
    assert [batch.trial_ids[owner] for owner in owners] == trained
    assert batch.advantages is not None
    moved = set(batch.rollout[batch.advantages != 0].tolist())
    assert {batch.trial_ids[rollout] for rollout in moved} == set(trained) - {"c1"}
    assert metrics["group/with_signal"] == pytest.approx(len(trained) / 6)
    assert [group.uniform for group in groups] == [not trained, True]


def test_branches_of_a_rollout_that_cannot_be_trained_share_their_own_baseline() -> None:
    failed = replace(trial("trunk", 1.0, 4), reward=None)
    one, two = branch("b1", "trunk", 2, 1.0, 3), branch("b2", "trunk", 2, 0.0, 3)
    batch = build_batch([Group("g", Task("t", {}), [failed, one, two])])
    assert advantages_of(batch, "tree").tolist() == [1.0, 1.0, -1.0, -1.0]
