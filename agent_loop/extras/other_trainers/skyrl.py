"""SkyRL trains on trials of any agent: a generator that takes them from our proxy.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return AgentGenerator(RemoteAgentLoop(proxy, launcher, rewards, Path("trials")), tasks)

It has the one method of SkyRL's `GeneratorInterface` (SkyRL 0.3.0, `train/generators/base.py`), and
imports nothing of SkyRL. The proxy samples with SkyRL's engines if they are its engines, or with
engines of its own, to which SkyRL's weights must be brought. `trial_batch` says which tokens of a
trial SkyRL gets.

SkyRL takes images as the pixels of the model's own processor, all images of a sample together.
With `pixels=Processor(path).joined` (`trainer.extras.images.pixels`) it gets them. Invariant: they
are those that the engine had, or the batch fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_loop.extras.other_trainers.trial_batch import (
    Completion,
    TrialBatch,
    TrialLoop,
    completion,
    rewards,
)
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.records import SessionKind

JoinedPixels = Callable[[Sequence[tuple[bytes, str]]], tuple[Any, Any]]
"""Gets the bytes and the digest (`ImageSpan.digest`) of each image of a sample, in order; returns
tensors: pixels `[P, C]`, a row for each patch, and grids `[I, 3]`. Without images, P and I are 0.
Raises an error if it makes other pixels than the engine had."""


class AgentGenerator:
    """SkyRL's generator. Example: AgentGenerator(loop, [Task("hi", {"prompt": "Say hi."})])"""

    def __init__(
        self,
        loop: TrialLoop,
        tasks: Sequence[Task],
        *,
        concurrency: int = 8,
        seed: int = 0,
        pixels: JoinedPixels | None = None,
    ) -> None:
        """`tasks` are found by the last message of each prompt of SkyRL's dataset. Without
        `pixels`, a trial with images fails the batch."""
        self._trials = TrialBatch(loop, tasks, concurrency=concurrency, seed=seed)
        self._pixels = pixels

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """One trial per prompt of a `GeneratorInput`; returns a `GeneratorOutput`.

        Raises:
            AgentLoopError: a prompt is not of a task, no trial of the batch can be trained, or one
                has images without `pixels`.
        """
        batch = input_batch.get("batch_metadata")
        step = 0 if batch is None else int(batch.global_step)
        evaluates = batch is not None and batch.training_phase == "eval"
        kind = SessionKind.EVAL if evaluates else SessionKind.TRAIN
        rollouts = await self._trials.run(input_batch["prompts"], step=step, kind=kind)
        reads = self._pixels is not None
        found = [completion(rollout, reads_images=reads) for rollout in rollouts]
        failed = sum(rollout.status is RolloutStatus.FAILED for rollout in rollouts)
        return {
            "prompt_token_ids": [each.prompt_ids for each in found],
            "response_ids": [each.completion_ids for each in found],
            "rewards": rewards(rollouts, kind),
            "loss_masks": [each.mask for each in found],
            "stop_reasons": [_stop_reason(rollout) for rollout in rollouts],
            "rollout_metrics": {
                "trials/failed": failed,
                "trials/tokens_left_out": sum(each.left_out for each in found),
            },
            "rollout_logprobs": [each.logprobs for each in found],
            "trajectory_ids": input_batch.get("trajectory_ids"),
            **({} if evaluates else self._images(found)),
        }

    def _images(self, found: Sequence[Completion]) -> dict[str, list[Any]]:
        """SkyRL's columns of images, which it takes for all samples of a batch or for none."""
        if self._pixels is None or not any(each.images for each in found):
            return {}
        made = [
            self._pixels([(each.pictures[image.sha256], image.digest) for image in each.images])
            for each in found
        ]
        pixels, grids = zip(*made, strict=True)
        return {"pixel_values": list(pixels), "image_grid_thw": list(grids)}

    async def close(self) -> None:
        """Closes the loop of trials."""
        await self._trials.close()


def _stop_reason(rollout: Rollout) -> str:
    return "stop" if rollout.status is RolloutStatus.DONE else "length"
