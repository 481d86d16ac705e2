"""Whatever number a reward is: it is trained with finite advantages, or its trial fails."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import RewardError
from agent_loop.records import Group, Task
from agent_loop.reward_values import REWARD_LIMIT
from proxy.records import Reward
from tests.agent_loop.test_reward_limits import rollout
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.algorithm import Algorithm
from trainer.algorithms.config import AlgorithmConfig
from trainer.batch import trained_batch

ESTIMATORS = [name for name in ADVANTAGES.names if name != "gae"]
numbers = st.one_of(
    st.floats(), st.integers(), st.integers(-(10**400), 10**400), st.booleans(),
    st.floats(-REWARD_LIMIT, REWARD_LIMIT), st.floats(-1e-300, 1e-300),
    st.floats().map(str), st.text(max_size=9),
)  # fmt: skip


@given(
    raw=st.lists(numbers, min_size=2, max_size=5),
    of_turn=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    name=st.sampled_from(ESTIMATORS),
)
def test_any_reward_is_trained_with_finite_advantages_or_fails_its_trial(
    raw: list[object], of_turn: float | None, name: str
) -> None:
    posted = [] if of_turn is None else [Reward("step", of_turn, turn=1)]
    rollouts = []
    for index, value in enumerate(raw):
        try:
            rollouts.append(rollout(f"r{index}", value, posted))
        except RewardError:
            continue
        assert abs(float(value)) <= REWARD_LIMIT  # type: ignore[arg-type]
    if not rollouts:
        return
    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": name}))
    batch = trained_batch([Group("g", Task("t", {}), tuple(rollouts))])
    metrics = algorithm.compute_advantages(batch)
    assert batch.advantages is not None
    assert torch.isfinite(batch.advantages).all()
    assert all(map(math.isfinite, metrics.values()))
    values = {each.reward for each in rollouts}
    if name in ("grpo", "dr_grpo", "rloo", "opo", "gpg") and len(values) == 1:
        assert not batch.advantages.any()
