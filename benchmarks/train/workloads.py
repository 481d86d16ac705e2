"""Groups of random tokens with typical shapes. Every contestant gets the same groups.

`sessions.json` has recorded sessions of agents as counts of tokens (`benchmarks.train.capture`).
Nothing else of the sessions is in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task

SESSIONS_FILE = Path(__file__).parent / "sessions.json"


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


@dataclass(frozen=True)
class Node:
    """A part of the tree of some sessions that all of its paths have whole.

    Example: Node(-1, (18900, 60, 60)), a first prompt, an answer and what a tool returned
    """

    parent: int
    """-1: none."""
    runs: tuple[int, ...]
    """Numbers of tokens of context and sampled tokens, in turn."""

    @property
    def sampled(self) -> np.ndarray:
        """Whether each of its tokens was sampled."""
        return np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs)


@dataclass(frozen=True)
class Recorded:
    """Recorded sessions of one agent on one task: a group of trials."""

    nodes: tuple[Node, ...]
    """The tree of all trials; a node stands after its parent."""
    trials: tuple[tuple[int, ...], ...]
    """For each trial the nodes that its paths end in."""
    groups: int = 1
    """Tasks with these trials. What all trials of the record begin with, they all begin with."""

    def shorter(self, by: int) -> Recorded:
        """The same tree with this part of each number of tokens, for a machine that is too slow
        for the whole."""
        nodes = (
            replace(node, runs=tuple(max(min(n, 1), round(n / by)) for n in node.runs))
            for node in self.nodes
        )
        return replace(self, nodes=tuple(nodes))


def sessions() -> dict[str, Recorded]:
    """The workloads of `sessions.json`, and each as a batch of four tasks."""
    found = {}
    for name, each in json.loads(SESSIONS_FILE.read_text(encoding="utf-8")).items():
        nodes = tuple(Node(parent, tuple(runs)) for parent, *runs in each["nodes"])
        found[name] = Recorded(nodes, tuple(map(tuple, each["trials"])))
        found[f"{name}-batch"] = replace(found[name], groups=4)
    return found


WORKLOADS = {
    # one answer to a short question; only the question is shared
    "single-turn": Workload(4, 8, 128, 1, (50, 500), (0, 0), 0),
    # a small tool-using agent
    "tools": Workload(4, 8, 400, 4, (20, 80), (10, 60), 0),
    # a coding agent: a long system prompt with tools, shared by the group and by its sub-agents
    "coding-agent": Workload(1, 8, 4000, 2, (30, 100), (50, 150), 1),
}
SESSIONS = sessions()


def make_groups(workload: Workload | Recorded, vocabulary: int, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    if isinstance(workload, Recorded):
        return _of_sessions(workload, vocabulary, rng)
    made = []
    for number in range(workload.groups):
        shared = rng.integers(0, vocabulary, workload.shared)
        made.append(_group(workload, vocabulary, rng, f"task-{number}", shared))
    return made


def _of_sessions(recorded: Recorded, vocabulary: int, rng: np.random.Generator) -> list[Group]:
    """Nodes with the same parent begin with different tokens."""
    made = []
    ids: list[np.ndarray] = []
    for number in range(recorded.groups):
        task, rollouts = Task(f"task-{number}", {}), []
        fresh = [rng.integers(0, vocabulary, sum(node.runs)) for node in recorded.nodes]
        siblings: Counter[int] = Counter()
        for at, node in enumerate(recorded.nodes):
            fresh[at][0] = (siblings[node.parent] + number * len(fresh)) % vocabulary
            siblings[node.parent] += 1
            if number and node.parent < 0:
                fresh[at] = ids[at]
        ids = fresh
        for trial, ends in enumerate(recorded.trials):
            rollouts.append(
                Rollout(
                    trial_id=f"{task.task_id}-{trial}",
                    task=task,
                    status=RolloutStatus.DONE,
                    reward=float(rng.integers(0, 2)),
                    segments=_segments(recorded, ends, ids),
                )
            )
        made.append(Group(task.task_id, task, rollouts))
    return made


def _segments(
    recorded: Recorded, ends: Sequence[int], ids: list[np.ndarray]
) -> tuple[Segment, ...]:
    """The part of the tree that one trial has."""
    own: set[int] = set()
    for end in ends:
        while end >= 0:
            own.add(end)
            end = recorded.nodes[end].parent
    places = {node: place for place, node in enumerate(sorted(own))}
    return tuple(
        _segment(
            places.get(recorded.nodes[node].parent, -1),
            ids[node],
            recorded.nodes[node].sampled,
            place,
        )
        for node, place in places.items()
    )


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
