"""Evaluation: estimates agree with their definitions, and rollouts are not trained on."""

from __future__ import annotations

import itertools
import math

import pytest

from agent_loop.evaluator import EvalConfig, Evaluator, pass_at_k
from agent_loop.records import Task
from proxy.records import SessionKind
from proxy.run_files.intervals import wilson_interval
from tests.agent_loop.scripted_loop import ScriptedLoop

TASKS = [Task("a1", {}, "a"), Task("a2", {}, "a"), Task("b1", {}, "b")]


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 5, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_interval_matches_published_values() -> None:
    """Newcombe 1998, table I: 81/263 and 0/20."""
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


async def test_report_has_success_and_mean_reward_by_source() -> None:
    rewards = {"a1": 1.0, "a2": 0.5, "b1": 1.0}
    loop = ScriptedLoop(reward=lambda task, seed: rewards[task.task_id])
    settings = EvalConfig(repeats=2)
    report = await Evaluator(loop, TASKS, settings).evaluate(version=4)
    assert report.overall.success == pytest.approx(2 / 3)
    assert report.overall.mean_reward == pytest.approx(2.5 / 3)
    assert report.overall.pass_at_k == {1: pytest.approx(2 / 3), 2: pytest.approx(2 / 3)}
    assert report.per_source["a"].success == 0.5
    assert report.per_source["b"].success == 1.0
    assert report.as_dict()["per_source"]["b"]["rollouts"] == 2


async def test_evaluation_uses_eval_sessions_whose_rollouts_have_no_trainable_token() -> None:
    loop = ScriptedLoop()
    report = await Evaluator(loop, TASKS, EvalConfig()).evaluate(version=0)
    assert set(loop.kinds) == {SessionKind.EVAL}
    assert not any(rollout.trainable for rollout in report.rollouts)


async def test_failed_trials_are_counted_and_left_out_of_the_means() -> None:
    loop = ScriptedLoop(reward=lambda *_: 1.0, fails=lambda task, _: task.task_id == "a2")
    report = await Evaluator(loop, TASKS, EvalConfig()).evaluate(version=0)
    assert (report.overall.success, report.overall.tasks, report.overall.failed) == (1.0, 2, 1)
    loop.fails = lambda *_: True
    nothing = await Evaluator(loop, TASKS, EvalConfig()).evaluate(version=0)
    assert math.isnan(nothing.overall.success)
    assert nothing.overall.interval == (0.0, 1.0)


async def test_reward_from_success_at_on_is_a_success() -> None:
    loop = ScriptedLoop(reward=lambda task, seed: {"a1": 0.5, "a2": 0.4, "b1": 1.0}[task.task_id])
    report = await Evaluator(loop, TASKS, EvalConfig(success_at=0.5)).evaluate(version=0)
    assert report.overall.success == pytest.approx(2 / 3)
