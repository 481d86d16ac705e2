"""A batch of trials for a trainer that trains one completion per prompt.

Of a trial that forked, the path with the most trained tokens is used. Invariant: tokens and
log-probabilities are those that were recorded, and the mask is 0 for tokens that the policy did not
sample, or not from its whole vocabulary (an answer with a grammar). A trial that cannot be trained
has a mask of zeros and its group's mean reward, so that it changes neither the gradient nor the
group's baseline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from agent_loop.errors import AgentLoopError
from agent_loop.producers.groups import rollout_seed
from agent_loop.producers.protocol import RunsTrials
from agent_loop.records import Rollout, Task
from agent_loop.trajectory import flatten
from proxy.records import ImageSpan, SessionKind
from proxy.records.images import engine_ids


class TrialLoop(RunsTrials, Protocol):
    """What runs the trials: a `RemoteAgentLoop`."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """One trial as a prompt and a completion. Example: Completion([1, 2], [3], [-0.5], [1])"""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """One per token of the completion; 0.0 for a token that is not trained."""
    mask: list[int]
    """1 for each token of the completion that is trained, otherwise 0."""
    left_out: int = 0
    """Number of its sampled tokens that are not trained, because top-k or a grammar
    (`response_format`) left a part of the vocabulary."""
    images: Sequence[ImageSpan] = ()
    """The images in prompt and completion, whose tokens have the model's own id."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """sha256 → the bytes of an image."""


class TrialBatch:
    """Runs trials of given tasks, at most `concurrency` at the same time."""

    def __init__(
        self, loop: TrialLoop, tasks: Sequence[Task], *, concurrency: int, seed: int
    ) -> None:
        self._loop = loop
        self._tasks = {task.prompt: task for task in tasks}
        self._slots = asyncio.Semaphore(concurrency)
        self._seed = seed

    async def run(
        self, prompts: Sequence[Any], *, step: int, kind: SessionKind = SessionKind.TRAIN
    ) -> list[Rollout]:
        """One trial per prompt, which is a text or messages whose last one is the task's prompt.

        Raises:
            AgentLoopError: a prompt is not of a task; or the trials are to be trained, and none of
                them can be, or none of their tokens.
        """
        tasks = [self._task(prompt) for prompt in prompts]

        async def one(number: int, task: Task) -> Rollout:
            async with self._slots:
                seed = rollout_seed(self._seed, step, number)
                return await self._loop.run(task, kind=kind, seed=seed, version=step)

        async with asyncio.TaskGroup() as running:
            trials = [running.create_task(one(n, task)) for n, task in enumerate(tasks)]
        rollouts = [trial.result() for trial in trials]
        if kind is SessionKind.TRAIN and not any(rollout.trainable for rollout in rollouts):
            raise AgentLoopError(f"no trial of the batch can be trained: {rollouts[0].error}")
        masks = (completion(rollout, reads_images=True).mask for rollout in rollouts)
        if kind is SessionKind.TRAIN and not any(map(any, masks)):
            raise AgentLoopError(
                "no token of the batch can be trained: all were sampled with top-k or a grammar "
                "(response_format), and this trainer computes probabilities over the whole "
                "vocabulary; set the loop's sampling to top_k=0"
            )
        return rollouts

    async def close(self) -> None:
        """Closes the loop of trials."""
        await self._loop.close()

    def _task(self, prompt: Any) -> Task:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if text not in self._tasks:
            raise AgentLoopError(f"the prompt {text[:80]!r} is not the prompt of a given task")
        return self._tasks[text]


def completion(rollout: Rollout, *, reads_images: bool = False) -> Completion:
    """The rollout's path with the most sampled tokens.

    Raises AgentLoopError: it has images, and the trainer does not read them from completions.
    """
    paths = flatten(rollout.segments) if rollout.trainable else []
    if not paths:  # trainers need a token in each part
        return Completion([0], [0], [0.0], [0])
    path = max(paths, key=lambda path: int(path.sampled_from_all.sum()))
    if path.images and not reads_images:
        raise AgentLoopError(
            f"trial {rollout.trial_id} has images, for which this trainer's completions have no "
            "place; train with agentic-train and model.vision=frozen, or with SkyRL "
            "(AgentGenerator's pixels), or set rendering.images=false in the proxy, whose model "
            "then sees them as texts"
        )
    first, trained = int(path.mask.argmax()), path.sampled_from_all
    ids = engine_ids(path.ids, path.images)
    return Completion(
        ids[:first].tolist(),
        ids[first:].tolist(),
        np.where(trained, path.logprobs, np.float32(0))[first:].tolist(),
        trained[first:].astype(int).tolist(),
        int((path.mask & ~trained).sum()),
        path.images,
        rollout.pictures,
    )


def rewards(rollouts: Sequence[Rollout], kind: SessionKind = SessionKind.TRAIN) -> list[float]:
    """One per rollout. One that does not count (it has no reward, or it is to be trained and cannot
    be) gets the mean reward of the others of the same task, or 0.0 if there are none."""
    own = [
        rollout.reward if rollout.trainable or kind is SessionKind.EVAL else None
        for rollout in rollouts
    ]
    known: dict[str, list[float]] = {}
    for rollout, reward in zip(rollouts, own, strict=True):
        if reward is not None:
            known.setdefault(rollout.task.task_id, []).append(reward)
    means = {task_id: sum(values) / len(values) for task_id, values in known.items()}
    return [
        means.get(rollout.task.task_id, 0.0) if reward is None else reward
        for rollout, reward in zip(rollouts, own, strict=True)
    ]
