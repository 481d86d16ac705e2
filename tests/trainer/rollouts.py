"""Rollouts for tests of the trainer: random token trees, and rollouts of one path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task

VOCABULARY = 96


def rollout(
    rng: np.random.Generator,
    trial_id: str,
    *,
    reward: float = 1.0,
    prompt: Sequence[int] = (5, 6, 7),
    segments: int = 1,
    longest: int = 12,
    group: str = "g",
) -> Rollout:
    """A tree of `segments` random segments under a root that starts with `prompt`."""
    tree: list[Segment] = []
    for index in range(segments):
        parent = int(rng.integers(-1 if index > 2 else 0, index)) if index else -1
        length = int(rng.integers(2, longest + 1))
        ids = rng.integers(0, VOCABULARY, length)
        mask = rng.random(length) < 0.5
        mask[-1] = True
        if parent < 0:
            ids = np.concatenate([prompt, ids])
            mask = np.concatenate([np.zeros(len(prompt), np.bool_), mask])
        tree.append(_segment(parent, ids, mask, rng, turn=index))
    return Rollout(
        trial_id=trial_id,
        task=Task(group, {}),
        status=RolloutStatus.DONE,
        reward=reward,
        segments=tuple(tree),
        num_turns=segments,
    )


def group(rng: np.random.Generator, name: str, *, size: int = 4, segments: int = 1) -> Group:
    """Rollouts of one task, which share a prompt and part of what follows it."""
    prompt = rng.integers(0, VOCABULARY, int(rng.integers(3, 20))).tolist()
    rollouts = [
        rollout(
            rng,
            f"{name}-{i}",
            reward=float(rng.integers(0, 3)),
            prompt=prompt[: int(rng.integers(1, len(prompt) + 1))],
            segments=int(rng.integers(1, segments + 1)),
            group=name,
        )
        for i in range(size)
    ]
    return Group(name, Task(name, {}), rollouts)


def _segment(
    parent: int, ids: np.ndarray, mask: np.ndarray, rng: np.random.Generator, turn: int
) -> Segment:
    return Segment(
        parent=parent,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(len(ids)) * 3, 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        turns=np.full(len(ids), turn, np.int32),
    )
