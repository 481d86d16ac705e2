"""TRL's `GRPOTrainer` trains on trials of any agent: its `rollout_func` takes them from our proxy.

    loop = RemoteAgentLoop(proxy, launcher, rewards, Path("trials"))
    GRPOTrainer(…, rollout_func=AgentRollouts(loop, tasks, before=send_weights),
                reward_funcs=trial_reward)

The proxy samples with its engines, so `before` must bring TRL's weights to them. `trial_batch` says
which tokens of a trial TRL gets; its `env_mask` is 0 for tokens that the policy did not sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agent_loop.extras.other_trainers.trial_batch import TrialBatch, TrialLoop, completion, rewards
from agent_loop.records import Task

Rows = dict[str, list[Any]]


class AgentRollouts:
    """A `rollout_func`. It keeps one event loop for all of its calls; `close` ends it."""

    def __init__(
        self,
        loop: TrialLoop,
        tasks: Sequence[Task],
        *,
        before: Callable[[Any], None] = lambda trainer: None,
        concurrency: int = 8,
        seed: int = 0,
    ) -> None:
        """`tasks` are found by their prompts, which are the prompts of TRL's dataset. `before` is
        called with the trainer before each batch of trials."""
        self._trials = TrialBatch(loop, tasks, concurrency=concurrency, seed=seed)
        self._before = before
        self._runner = asyncio.Runner()
        self.metrics: dict[str, int] = {}
        """Of the last batch."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Rows:
        """One trial per prompt. `tokens_left_out` says of how many sampled tokens `env_mask` is 0,
        because they were sampled with a grammar; TRL's reward functions get it, and `metrics` has
        the sum.

        Raises:
            AgentLoopError: a prompt is not of a task, or no trial of the batch can be trained.
        """
        self._before(trainer)
        step = int(trainer.state.global_step)
        rollouts = self._runner.run(self._trials.run(prompts, step=step))
        found = [completion(rollout) for rollout in rollouts]
        self.metrics = {"trials/tokens_left_out": sum(each.left_out for each in found)}
        return {
            "prompt_ids": [each.prompt_ids for each in found],
            "completion_ids": [each.completion_ids for each in found],
            "logprobs": [each.logprobs for each in found],
            "env_mask": [each.mask for each in found],
            "trial_reward": rewards(rollouts),
            "trial_id": [rollout.trial_id for rollout in rollouts],
            "tokens_left_out": [each.left_out for each in found],
        }

    def close(self) -> None:
        """Closes the loop of trials and the event loop."""
        self._runner.run(self._trials.close())
        self._runner.close()


def trial_reward(trial_reward: list[float], **_: Any) -> list[float]:
    """The reward function for TRL: the rewards of the trials."""
    return trial_reward
