"""SkyRL trains on trials of any agent: a generator that takes them from our proxy.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return AgentGenerator(RemoteAgentLoop(proxy, launcher, rewards, Path("trials")), tasks)

It has the one method of SkyRL's `GeneratorInterface` (SkyRL 0.3.0, `train/generators/base.py`), and
imports nothing of SkyRL. The proxy samples with SkyRL's engines if they are its engines, or with
engines of its own, to which SkyRL's weights must be brought. `trial_batch` says which tokens of a
trial SkyRL gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.extras.other_trainers.trial_batch import TrialBatch, TrialLoop, completion, rewards
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.records import SessionKind


class AgentGenerator:
    """SkyRL's generator. Example: AgentGenerator(loop, [Task("hi", {"prompt": "Say hi."})])"""

    def __init__(
        self, loop: TrialLoop, tasks: Sequence[Task], *, concurrency: int = 8, seed: int = 0
    ) -> None:
        """`tasks` are found by the last message of each prompt of SkyRL's dataset."""
        self._trials = TrialBatch(loop, tasks, concurrency=concurrency, seed=seed)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """One trial per prompt of a `GeneratorInput`; returns a `GeneratorOutput`.

        Raises:
            AgentLoopError: a prompt is not of a task, or no trial of the batch can be trained.
        """
        batch = input_batch.get("batch_metadata")
        step = 0 if batch is None else int(batch.global_step)
        evaluates = batch is not None and batch.training_phase == "eval"
        kind = SessionKind.EVAL if evaluates else SessionKind.TRAIN
        rollouts = await self._trials.run(input_batch["prompts"], step=step, kind=kind)
        found = [completion(rollout) for rollout in rollouts]
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
        }

    async def close(self) -> None:
        """Closes the loop of trials."""
        await self._trials.close()


def _stop_reason(rollout: Rollout) -> str:
    return "stop" if rollout.status is RolloutStatus.DONE else "length"
