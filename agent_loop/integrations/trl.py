"""TRL's `GRPOTrainer` trains on trials of any agent: its `rollout_func` takes them from our proxy.

    loop = RemoteAgentLoop(proxy, launcher, rewards, Path("trials"))
    GRPOTrainer(…, rollout_func=AgentRollouts(loop, tasks, before=send_weights),
                reward_funcs=trial_reward)

The proxy samples with its engines, so `before` must bring TRL's weights to them. TRL trains one
completion per prompt: of a trial that forked, the path with the most sampled tokens is used.
Invariant: tokens and log-probabilities are those that were recorded; `env_mask` is 0 for tokens
that the policy did not sample. A trial that cannot be trained has a mask of zeros and its group's
mean reward, so that it changes neither the gradient nor the group's baseline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agent_loop.errors import AgentLoopError
from agent_loop.producers.groups import RunsTrials, rollout_seed
from agent_loop.records import Rollout, Task
from agent_loop.trajectory import flatten
from proxy.records import SessionKind

Rows = dict[str, list[Any]]


class TrialLoop(RunsTrials, Protocol):
    """What runs the trials: a `RemoteAgentLoop`."""

    async def close(self) -> None: ...


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
        self._loop = loop
        self._tasks = {task.prompt: task for task in tasks}
        self._before = before
        self._slots = asyncio.Semaphore(concurrency)
        self._seed = seed
        self._runner = asyncio.Runner()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Rows:
        """One trial per prompt.

        Raises:
            AgentLoopError: a prompt is not of a task, or no trial of the batch can be trained.
        """
        self._before(trainer)
        tasks = [self._task(prompt) for prompt in prompts]
        rollouts = self._runner.run(self._run(tasks, int(trainer.state.global_step)))
        if not any(rollout.trainable for rollout in rollouts):
            raise AgentLoopError(f"no trial of the batch can be trained: {rollouts[0].error}")
        rows: Rows = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
        for rollout in rollouts:
            for name, value in _row(rollout).items():
                rows[name].append(value)
        rows["trial_reward"] = _rewards(rollouts)
        rows["trial_id"] = [rollout.trial_id for rollout in rollouts]
        return rows

    def close(self) -> None:
        """Closes the loop of trials and the event loop."""
        self._runner.run(self._loop.close())
        self._runner.close()

    def _task(self, prompt: Any) -> Task:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if text not in self._tasks:
            raise AgentLoopError(f"the prompt {text[:80]!r} is not the prompt of a given task")
        return self._tasks[text]

    async def _run(self, tasks: Sequence[Task], step: int) -> list[Rollout]:
        async def one(number: int, task: Task) -> Rollout:
            async with self._slots:
                seed = rollout_seed(self._seed, step, number)
                return await self._loop.run(task, kind=SessionKind.TRAIN, seed=seed, version=step)

        async with asyncio.TaskGroup() as running:
            trials = [running.create_task(one(n, task)) for n, task in enumerate(tasks)]
        return [trial.result() for trial in trials]


def trial_reward(trial_reward: list[float], **_: Any) -> list[float]:
    """The reward function for TRL: the rewards of the trials."""
    return trial_reward


def _row(rollout: Rollout) -> dict[str, list[Any]]:
    paths = flatten(rollout.segments) if rollout.trainable else []
    if not paths:  # TRL needs a token in each part
        return {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0]}
    path = max(paths, key=lambda path: int(path.mask.sum()))
    first = int(path.mask.argmax())
    return {
        "prompt_ids": path.ids[:first].tolist(),
        "completion_ids": path.ids[first:].tolist(),
        "logprobs": path.logprobs[first:].tolist(),
        "env_mask": path.mask[first:].astype(int).tolist(),
    }


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """One per rollout; for one that cannot be trained, the mean of those of the same task."""
    known: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.trainable and rollout.reward is not None:
            known.setdefault(rollout.task.task_id, []).append(rollout.reward)
    means = {task_id: sum(values) / len(values) for task_id, values in known.items()}
    return [
        rollout.reward
        if rollout.trainable and rollout.reward is not None
        else means.get(rollout.task.task_id, 0.0)
        for rollout in rollouts
    ]
