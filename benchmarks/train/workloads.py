"""Groups of random tokens with typical shapes. Every contestant gets the same groups.

`sessions.json` has token counts of agents' sessions: how long their first prompt is, which all
trials share, and what a trial adds. Nothing else of the sessions is in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task


@dataclass(frozen=True)
class Workload:
    """`groups` tasks with `rollouts` trials each; lengths in tokens."""

    groups: int
    rollouts: int
    shared: int
    """Number of tokens that all trials of a group start with: system prompt, tools, task."""
    turns: int
    answer: tuple[int, int]
    """Shortest and longest sampled answer of a turn."""
    result: tuple[int, int]
    """Shortest and longest tool result after a turn."""
    forks: int
    """Number of sub-agents of a trial: branches of two turns that start at the shared prefix."""
    one_prompt: bool = False
    """Whether the shared tokens are those of all groups, such as an agent's system prompt."""


def sessions() -> dict[str, Workload]:
    """The workloads of `sessions.json`."""
    counts = json.loads((Path(__file__).parent / "sessions.json").read_text(encoding="utf-8"))
    return {
        name: Workload(
            each["groups"],
            each["rollouts"],
            each["prompt"],
            each["turns"],
            (each["answer"],) * 2,
            (each["result"],) * 2,
            0,
            one_prompt=True,
        )
        for name, each in counts.items()
        if name != "about"
    }


WORKLOADS = {
    # one answer to a short question; only the question is shared
    "single-turn": Workload(4, 8, 128, 1, (50, 500), (0, 0), 0),
    # a small tool-using agent
    "tools": Workload(4, 8, 400, 4, (20, 80), (10, 60), 0),
    # a coding agent: a long system prompt with tools, shared by the group and by its sub-agents
    "coding-agent": Workload(1, 8, 4000, 2, (30, 100), (50, 150), 1),
}
SESSIONS = sessions()


def make_groups(workload: Workload, vocabulary: int, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocabulary, workload.shared)
    made = []
    for number in range(workload.groups):
        if number and not workload.one_prompt:
            shared = rng.integers(0, vocabulary, workload.shared)
        made.append(_group(workload, vocabulary, rng, f"task-{number}", shared))
    return made


def _group(
    workload: Workload, vocabulary: int, rng: np.random.Generator, name: str, shared: np.ndarray
) -> Group:
    task = Task(name, {})
    rollouts = []
    for index in range(workload.rollouts):
        root = _segment(-1, shared, np.zeros(len(shared), np.bool_), 0)
        segments = [root, _branch(workload, vocabulary, rng, workload.turns)]
        segments += [_branch(workload, vocabulary, rng, 2) for _ in range(workload.forks)]
        rollouts.append(
            Rollout(
                trial_id=f"{name}-{index}",
                task=task,
                status=RolloutStatus.DONE,
                reward=float(rng.integers(0, 2)),
                segments=tuple(segments),
            )
        )
    return Group(name, task, rollouts)


def _branch(workload: Workload, vocabulary: int, rng: np.random.Generator, turns: int) -> Segment:
    ids, mask = [], []
    for turn in range(turns):
        lengths = [rng.integers(*workload.answer, endpoint=True)]
        if turn < turns - 1:
            lengths.append(rng.integers(*workload.result, endpoint=True))
        for sampled, length in zip((True, False), lengths, strict=False):
            ids.append(rng.integers(0, vocabulary, length))
            mask.append(np.full(length, sampled))
    return _segment(0, np.concatenate(ids), np.concatenate(mask), 0)


def _segment(parent: int, ids: np.ndarray, mask: np.ndarray, turn: int) -> Segment:
    return Segment(
        parent=parent,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -7.0, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.full(len(ids), turn, np.int32),
    )
