"""Metrics of rollouts, staleness and mismatch compared with values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.batch import build_batch
from trainer.run.rollout_metrics import (
    MAX_PARTS,
    mismatch_metrics,
    rollout_metrics,
    staleness_metrics,
)

TASK = Task("t", {})


def test_lost_trials_are_summed_over_the_rollouts() -> None:
    lost = {"failed_attempts": 2.0, "continuations": 1.0, "lost_tokens": 40.0}
    rollouts = (
        replace(rollout("a", 1.0), metrics=lost),
        replace(rollout("b", None, RolloutStatus.FAILED), metrics=lost),
        rollout("c", 0.0),
    )
    metrics = rollout_metrics([Group("g", TASK, rollouts)], success_at=1.0)
    assert metrics["rollout/failed_attempts"] == 4.0
    assert metrics["rollout/continuations"] == 2.0
    assert metrics["rollout/diverged_continuations"] == 0.0
    assert metrics["rollout/lost_tokens"] == 80.0


def test_success_is_that_of_rollouts_from_the_start() -> None:
    begun = replace(rollout("b", 1.0), prefix="a@2")
    metrics = rollout_metrics([Group("g", TASK, (rollout("a", 0.0), begun))], success_at=1.0)
    assert metrics["rollout/with_prefix"] == 0.5
    assert metrics["rollout/success"] == metrics["reward/mean"] == 0.0
    metrics = rollout_metrics([Group("g", TASK, (begun,))], success_at=1.0)
    assert metrics["rollout/success"] == 1.0


def rollout(
    name: str,
    reward: float | None,
    status: RolloutStatus = RolloutStatus.DONE,
    versions: tuple[int, ...] = (3, 3),
    logprobs: tuple[float, ...] = (-1.0, -2.0),
) -> Rollout:
    count = len(versions)
    segment = Segment(
        parent=-1,
        ids=np.arange(count + 1, dtype=np.int32),
        mask=np.arange(count + 1) > 0,
        logprobs=np.array([0.0, *logprobs], np.float32),
        versions=np.array([-1, *versions], np.int32),
        turns=np.zeros(count + 1, np.int32),
    )
    return Rollout(name, TASK, status, reward, segments=(segment,), num_turns=2)


def test_failed_rollouts_are_counted_but_not_averaged() -> None:
    rollouts = [
        rollout("a", 1.0),
        rollout("b", 0.0, RolloutStatus.TRUNCATED),
        rollout("c", 0.0, RolloutStatus.FAILED),
        rollout("d", None),
    ]
    metrics = rollout_metrics([Group("g", TASK, rollouts)], success_at=1.0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/success"] == 0.5
    assert metrics["rollout/failed"] == 0.25
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["rollout/untrainable"] == 0.5
    assert metrics["rollout/sampled_tokens"] == 4.0


def test_parts_of_rewards_are_averaged_over_the_rollouts_that_have_them() -> None:
    rollouts = [
        replace(rollout("a", 1.0), reward_parts={"tests": 1.0, "style": 0.5}),
        replace(rollout("b", 0.0), reward_parts={"tests": 0.0}),
        replace(rollout("c", 0.0, RolloutStatus.FAILED), reward_parts={"tests": 9.0}),
    ]
    metrics = rollout_metrics([Group("g", TASK, rollouts)], success_at=1.0)
    assert metrics["reward/part/tests"] == 0.5
    assert metrics["reward/part/style"] == 0.5


def test_number_of_parts_with_a_metric_is_bounded() -> None:
    parts = {f"{number:05}": 1.0 for number in range(1000)}
    group = Group("g", TASK, [replace(rollout("a", 1.0), reward_parts=parts)])
    metrics = rollout_metrics([group], success_at=1.0)
    assert sum(name.startswith("reward/part/") for name in metrics) == MAX_PARTS


def test_rewards_are_also_reported_by_source() -> None:
    tasks = [Task("x", {}, source="x"), Task("y", {}, source="y")]
    groups = [
        Group("g", tasks[0], [replace(rollout("a", 1.0), task=tasks[0])]),
        Group("h", tasks[1], [replace(rollout("b", 0.0), task=tasks[1])]),
    ]
    metrics = rollout_metrics(groups, success_at=1.0)
    assert metrics["reward/source/x"] == 1.0
    assert metrics["reward/source/y"] == 0.0


def test_groups_with_equal_rewards_are_counted() -> None:
    same = Group("g", TASK, [rollout("a", 1.0), rollout("b", 1.0)])
    other = Group("h", TASK, [rollout("c", 1.0), rollout("d", 0.0)])
    assert rollout_metrics([same, other], success_at=1.0)["rollout/uniform_groups"] == 0.5


def test_staleness_is_counted_by_token() -> None:
    batch = build_batch([Group("g", TASK, [rollout("a", 1.0, versions=(3, 5))])])
    metrics = staleness_metrics(batch, 5)
    assert metrics["staleness/mean"] == 1.0
    assert metrics["staleness/max"] == 2.0
    assert metrics["staleness/tokens_at_0"] == metrics["staleness/tokens_at_2"] == 1.0


def test_mean_mismatch_counts_only_tokens_of_the_current_weights() -> None:
    batch = build_batch([Group("g", TASK, [rollout("a", 1.0, versions=(3, 5))])])
    metrics = mismatch_metrics(batch, torch.tensor([-9.0, -2.25]), 5)
    assert metrics["mismatch/logp_abs_mean"] == pytest.approx(0.25)
    assert metrics["mismatch/all_abs_mean"] == pytest.approx((8 + 0.25) / 2)
    weights = np.exp([-8.0, -0.25])
    assert metrics["mismatch/ess"] == pytest.approx(weights.sum() ** 2 / 2 / (weights**2).sum())
    k3 = sum(math.expm1(d) - d for d in (-8.0, -0.25)) / 2
    assert metrics["mismatch/k3"] == pytest.approx(k3)


def test_shared_prompt_is_the_common_beginning_of_a_groups_first_prompts() -> None:
    def begun(name: str, *prompt: int) -> Rollout:
        base = rollout(name, 1.0)
        (segment,) = base.segments
        ids = np.array([*prompt, 8, 9], np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
        versions = np.where(mask, 3, -1).astype(np.int32)
        turns = np.zeros(len(ids), np.int32)
        own = replace(
            segment, ids=ids, mask=mask, logprobs=logprobs, versions=versions, turns=turns
        )
        return replace(base, segments=(own,))

    parted = Group("g", TASK, (begun("a", 1, 2, 3, 4), begun("b", 1, 5, 3, 4)))
    same = Group("h", TASK, (begun("c", 1, 2), begun("d", 1, 2)))
    metrics = rollout_metrics([parted, same], success_at=1.0)
    assert metrics["rollout/shared_prompt"] == (1 / 4 + 1) / 2
    assert metrics["rollout/prompts_part_at"] == (1 + 2) / 2
    alone = Group("g", TASK, (begun("a", 1, 2),))
    assert "rollout/shared_prompt" not in rollout_metrics([alone], success_at=1.0)
