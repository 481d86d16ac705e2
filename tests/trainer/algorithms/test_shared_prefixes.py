"""Baselines among rollouts that share their prefix: the recorded turns with which they began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_loop.records import Group, Task
from tests.trainer.rollouts import rollout
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import build_batch

COMPARING = ["grpo", "dr_grpo", "rloo", "opo"]


def group_of(*rewards_by_prefix: tuple[str, Sequence[float]]) -> Group:
    """A group with a rollout per reward."""
    rng = np.random.default_rng(7)
    return Group(
        "g",
        Task("g", {}),
        [
            replace(rollout(rng, f"{prefix}-{number}", reward=reward), prefix=prefix)
            for prefix, rewards in rewards_by_prefix
            for number, reward in enumerate(rewards)
        ],
    )


def advantages(name: str, *groups: Group) -> dict[str, float]:
    """The advantage of each rollout, which all of its tokens have."""
    batch = build_batch(groups)
    Algorithm(AlgorithmConfig.model_validate({"advantage": name})).compute_advantages(batch)
    assert batch.advantages is not None
    found = {}
    for index, trial in enumerate(batch.trial_ids):
        (value,) = set(batch.advantages[batch.rollout == index].tolist())
        found[trial] = value
    return found


@pytest.mark.parametrize("name", COMPARING)
def test_rollouts_with_one_prefix_are_a_group_of_their_own(name: str) -> None:
    whole, branch = ("", [1.0, 0.0, 0.0]), ("p@3", [1.0, 1.0, 0.0, 1.0])
    mixed = advantages(name, group_of(whole, branch))
    alone = advantages(name, group_of(whole))
    assert {trial: mixed[trial] for trial in alone} == pytest.approx(alone)
    values = [mixed[f"p@3-{number}"] for number in range(4)]
    assert values[0] == values[1] == values[3] > 0 > values[2]


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_of_each_prefix_give_exactly_0(name: str) -> None:
    group = group_of(("", [0.0, 0.0]), ("p@3", [1.0, 1.0, 1.0]), ("p@4", [0.3, 0.3]))
    assert set(advantages(name, group).values()) == {0.0}
    assert group.uniform


@pytest.mark.parametrize("name", COMPARING)
def test_only_rollout_of_its_prefix_gets_exactly_0(name: str) -> None:
    found = advantages(name, group_of(("", [1.0, 0.0]), ("p@3", [1.0])))
    assert found["p@3-0"] == 0.0
    assert found["-0"] > 0 > found["-1"]


def test_equal_prefixes_of_different_groups_are_not_compared() -> None:
    """Two groups of one task whose rollouts branch from one session."""
    one, other = group_of(("p@3", [1.0, 1.0])), group_of(("p@3", [0.0, 0.0]))
    renamed = [replace(r, trial_id=f"other-{r.trial_id}") for r in other.rollouts]
    found = advantages("grpo", one, replace(other, rollouts=renamed))
    assert set(found.values()) == {0.0}


def test_group_is_uniform_only_if_every_prefix_is() -> None:
    assert not group_of(("", [1.0, 1.0]), ("p@3", [1.0, 0.0])).uniform
    assert group_of(("", [1.0]), ("p@3", [0.0])).uniform
