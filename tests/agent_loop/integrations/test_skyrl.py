"""Our generator for SkyRL, whose own check reads it in tests/e2e/test_exports_read_back.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from agent_loop.errors import AgentLoopError
from agent_loop.extras.other_trainers.skyrl import AgentGenerator
from agent_loop.records import Rollout, Task
from agent_loop.trajectory import build_segments
from proxy.engines.images import PROBE
from proxy.records import SessionKind
from tests.agent_loop.recorded import turn as a_turn
from tests.agent_loop.scripted_loop import ClosableLoop
from tests.trainer.policy.test_image_trees import IMAGE, PICTURES, StandIn, Written, picture
from trainer.errors import TrainingError
from trainer.extras.images.pixels import Pixels, Processor

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


def looking(*paths: Written) -> ClosableLoop:
    """A loop whose trials have these prompts, with their images, one after the other."""
    waiting = list(paths)

    class Looking(ClosableLoop):
        async def run(self, task: Task, **more: Any) -> Rollout:
            rollout, path = await super().run(task, **more), waiting.pop(0)
            recorded = a_turn(0, None, 0, path.ids, [11, 12])
            segments = build_segments([replace(recorded, images=tuple(path.images))])
            pictures = path.data if more["kind"] is SessionKind.TRAIN else {}
            return dataclasses.replace(rollout, segments=segments, pictures=pictures)

    return Looking()


def paths_with_images() -> tuple[Written, Written]:
    """One with two images, of which the second comes twice; and one without."""
    seen = Written().text(3).image(PICTURES[0]).text(2).image(PICTURES[2]).text(1)
    return seen.image(PICTURES[2]).text(1), Written(5).text(4)


class Pixelated(Processor):
    """The processor of the stand-in's images."""

    def __init__(self) -> None:
        self.stand_in = StandIn(Path())

    def pixels(self, data: bytes) -> Pixels:
        return self.stand_in.pixels(picture(2, 2, 0) if data == PROBE else data)


async def test_samples_have_the_pixels_of_their_images_in_order() -> None:
    seen, blind = paths_with_images()
    generator = AgentGenerator(looking(seen, blind), TASKS, pixels=Pixelated().joined)
    output = await generator.generate(batch("Say hi.", "Say bye."))
    made = [StandIn(Path()).pixels(PICTURES[n]) for n in (0, 2, 2)]
    first, second = output["pixel_values"]
    assert torch.equal(first, torch.cat([each.values for each in made]))
    assert second.shape == (0, first.shape[1])
    grids = output["image_grid_thw"]
    assert grids[0].tolist() == [each.grid.tolist() for each in made]
    assert grids[1].shape == (0, 3)
    ids = output["prompt_token_ids"][0]
    assert min(ids) >= 0
    assert ids.count(IMAGE) == sum(image.tokens for image in seen.images)


async def test_batch_without_images_has_no_columns_for_them() -> None:
    generator = AgentGenerator(ClosableLoop(), TASKS, pixels=Pixelated().joined)
    assert "pixel_values" not in await generator.generate(batch("Say hi."))


async def test_images_without_their_pixels_or_with_others_fail_the_batch() -> None:
    generator = AgentGenerator(looking(*paths_with_images()), TASKS)
    with pytest.raises(AgentLoopError, match=r"has images.*AgentGenerator's pixels"):
        await generator.generate(batch("Say hi.", "Say bye."))
    seen, blind = paths_with_images()
    seen.data = dict.fromkeys(seen.data, picture(4, 4, 77))
    generator = AgentGenerator(looking(seen, blind), TASKS, pixels=Pixelated().joined)
    with pytest.raises(TrainingError, match="the engine had other pixels of an image"):
        await generator.generate(batch("Say hi.", "Say bye."))
