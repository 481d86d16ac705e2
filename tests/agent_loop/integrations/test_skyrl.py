"""Our generator for SkyRL, whose own check reads it in tests/e2e/test_exports_read_back.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.errors import AgentLoopError
from agent_loop.extras.other_trainers.skyrl import AgentGenerator
from agent_loop.records import Task
from proxy.records import SessionKind
from tests.agent_loop.scripted_loop import ClosableLoop

TASKS = [Task("hi", {"prompt": "Say hi."}), Task("bye", {"prompt": "Say bye."})]


def batch(*prompts: str, phase: str = "train") -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": prompt}] for prompt in prompts],
        "env_classes": [],
        "env_extras": None,
        "sampling_params": None,
        "trajectory_ids": [f"t-{number}" for number, _ in enumerate(prompts)],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase=phase),
    }


async def test_each_prompt_has_the_recorded_tokens_of_one_trial() -> None:
    loop = ClosableLoop()
    output = await AgentGenerator(loop, TASKS).generate(batch("Say hi.", "Say hi.", "Say bye."))
    assert loop.kinds == [SessionKind.TRAIN] * 3
    lengths = [len(ids) for ids in output["response_ids"]]
    assert lengths == [2, 2, 2]
    assert [len(row) for row in output["loss_masks"]] == lengths
    assert [len(row) for row in output["rollout_logprobs"]] == lengths
    assert output["prompt_token_ids"] == [[1]] * 3
    assert output["trajectory_ids"] == ["t-0", "t-1", "t-2"]
    assert output["stop_reasons"] == ["stop"] * 3
    assert output["rollout_metrics"] == {"trials/failed": 0, "trials/tokens_left_out": 0}
    assert set(output["rewards"]) <= {0.0, 1.0}


async def test_failed_trial_changes_neither_gradient_nor_baseline() -> None:
    started: list[int] = []

    def first_fails(task: Task, seed: int) -> bool:
        started.append(seed)
        return len(started) == 1

    loop = ClosableLoop(fails=first_fails, reward=lambda task, seed: 0.75)
    output = await AgentGenerator(loop, TASKS).generate(batch("Say hi.", "Say hi."))
    assert output["rewards"] == [0.75, 0.75]
    assert output["loss_masks"][0] == [0]
    assert output["rollout_metrics"] == {"trials/failed": 1, "trials/tokens_left_out": 0}


async def test_evaluation_is_not_recorded_for_training_and_keeps_its_rewards() -> None:
    loop = ClosableLoop(reward=lambda task, seed: 0.5)
    output = await AgentGenerator(loop, TASKS).generate(batch("Say hi.", phase="eval"))
    assert loop.kinds == [SessionKind.EVAL]
    assert output["rewards"] == [0.5]


async def test_prompt_of_no_task_and_batch_without_a_trial_to_train_are_refused() -> None:
    generator = AgentGenerator(ClosableLoop(fails=lambda *_: True), TASKS)
    with pytest.raises(AgentLoopError, match="'Other' is not the prompt of a given task"):
        await generator.generate(batch("Other"))
    with pytest.raises(AgentLoopError, match="no trial of the batch can be trained"):
        await generator.generate(batch("Say hi."))
    await generator.close()
