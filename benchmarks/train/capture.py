"""Records sessions of real agents, and keeps their counts of tokens: `sessions.json`.

    python -m benchmarks.train.capture --packages DIR claude_code codex

Each agent makes some trials of one task through the proxy. A scripted policy answers: it writes,
edits and reads files, runs commands, looks at a picture and delegates, and in each trial it begins
at another step. The tree of all trials is kept as counts: for each node its parent and how many
tokens of context and sampled tokens alternate in it, and for each trial the nodes that its paths
end in. No text and no id of a token is kept. `DIR` is a folder in which `dashscope` is installed,
which has Qwen3's vocabulary; the agents are those of `make agents`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.records import Rollout, RolloutStatus, Trajectory
from agent_loop.trajectory import flatten
from benchmarks.train.workloads import SESSIONS_FILE, Node
from proxy.token_tree.paths import common_prefix
from tests.e2e.agents.census.agents import Agent, agents
from tests.e2e.agents.census.day import work_of_a_day
from tests.e2e.agents.census.families import CONTEXT_TOKENS, FAMILIES, Writer, write_family
from tests.e2e.agents.census.policy import Step
from tests.e2e.agents.census.run import run_agent
from tests.proxy.conftest import RunningProxy, starting_proxies

TRIALS = 8
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Path:
    trial: int
    trajectory: Trajectory


def counted(trials: Sequence[Sequence[Trajectory]]) -> tuple[list[Node], list[list[int]]]:
    """The tree of all trials' paths, each node after its parent, and for each trial the nodes that
    its paths end in."""
    nodes: list[Node] = []
    ends: list[list[int]] = [[] for _ in trials]

    def add(parent: int, start: int, paths: Sequence[_Path]) -> None:
        first = paths[0].trajectory.ids[start:]
        shared = min((common_prefix(first, p.trajectory.ids[start:]) for p in paths), default=0)
        number = parent
        if shared:
            stop = start + shared
            sampled = np.logical_or.reduce([p.trajectory.mask[start:stop] for p in paths])
            nodes.append(Node(parent, runs_of(sampled)))
            number, start = len(nodes) - 1, stop
        branches: dict[int, list[_Path]] = {}
        for path in paths:
            ids = path.trajectory.ids
            if len(ids) > start:
                branches.setdefault(int(ids[start]), []).append(path)
            else:
                ends[path.trial].append(number)
        for branch in branches.values():
            add(number, start, branch)

    found = [_Path(n, path) for n, paths in enumerate(trials) for path in paths]
    add(-1, 0, found)
    return nodes, ends


def runs_of(sampled: np.ndarray) -> tuple[int, ...]:
    """Numbers of tokens of context and sampled, in turn; the first of context, which may be 0."""
    borders = np.flatnonzero(np.diff(sampled)) + 1
    counts = np.diff([0, *borders, len(sampled)]).tolist()
    return (0, *counts) if sampled[0] else tuple(counts)


async def _trial(
    agent: Agent, proxy: RunningProxy, writer: Writer, folder: Path, number: int, steps: int
) -> Rollout:
    def plan(_: list[dict[str, Any]], workspace: str, part: int) -> list[Step]:
        return work_of_a_day(agent, workspace, part)[number : number + steps]

    _, _, rollout, _ = await run_agent(agent, proxy, writer, folder, timeout_s=TIMEOUT_S, plan=plan)
    return rollout


async def _captured(
    name: str, writer: Writer, checkpoint: Path, folder: Path, steps: int
) -> dict[str, Any]:
    agent = agents()[name]
    agent = replace(agent, argvs=agent.argvs[:1])
    trials = []
    folder.mkdir()
    async with starting_proxies(checkpoint, writer.rendering, folder) as start:
        proxy = await start(
            max_context_tokens=CONTEXT_TOKENS, rendering={"renderer": writer.renderer}
        )
        for number in range(TRIALS):
            # One path for all, as for agents behind the wall: prompts name it.
            work = folder / "trial"
            rollout = await _trial(agent, proxy, writer, work, number, steps)
            shutil.rmtree(work)
            if rollout.status is not RolloutStatus.DONE:
                raise RuntimeError(f"{name}, trial {number}: {rollout.status} {rollout.error}")
            trials.append(flatten(rollout.segments))
            print(name, number, [(len(t.ids), int(t.mask.sum())) for t in trials[-1]], flush=True)
    nodes, ends = counted(trials)
    return {
        "version": agent.version(agent.root),
        "nodes": [[node.parent, *node.runs] for node in nodes],
        "trials": ends,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.capture", description=__doc__)
    parser.add_argument("agents", nargs="+", choices=("claude_code", "codex"))
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument(
        "--steps", type=int, default=16, help="answers of a trial, besides those of sub-agents"
    )
    given = parser.parse_args()
    kept = json.loads(SESSIONS_FILE.read_text(encoding="utf-8"))
    family = FAMILIES["qwen3.5"]
    folder = Path(tempfile.mkdtemp(prefix="capture-"))
    checkpoint = write_family(family, folder / "checkpoint", given.packages)
    writer = Writer(family, checkpoint)
    for name in given.agents:
        made = asyncio.run(_captured(name, writer, checkpoint, folder / name, given.steps))
        kept[name.replace("_", "-")] = made
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items())
    SESSIONS_FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
