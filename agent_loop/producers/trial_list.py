"""Runs a list of trials once, without training, and continues after an interruption.

Every finished trial is one line of `trials.jsonl`; a second start runs only the trials that have no
line. Invariant: a line is written after the trial's session has its reward; a failed trial has a
line and is run again by the next start.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.producers.groups import rollout_seed
from agent_loop.producers.protocol import RunsTrials
from agent_loop.records import Rollout, RolloutStatus, Task
from proxy.client import ProxyClient
from proxy.records import TRIAL_REWARD, Reward, SessionKind
from proxy.run_files.files import drop_incomplete_line


@dataclass(frozen=True, slots=True)
class TrialLine:
    """A finished trial. Example: TrialLine("sum-17", "sums", 0, "sum-17-9fJq", "done", 1.0, 3)"""

    task_id: str
    source: str
    repeat: int
    """Number of the trial among those of its task, from 0."""
    trial_id: str
    status: str
    reward: float | None
    turns: int
    error: str | None = None
    agent: str = ""
    """Name of the agent; empty in a run with one agent."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.agent, self.source, self.task_id, self.repeat

    @property
    def judged(self) -> bool:
        """Whether it counts: it did not fail and has a reward."""
        return self.reward is not None and self.status in (
            RolloutStatus.DONE,
            RolloutStatus.TRUNCATED,
        )


def read_lines(file: Path) -> list[TrialLine]:
    """The newest line of each trial; a last line without an end is ignored."""
    found: dict[tuple[str, str, str, int], TrialLine] = {}
    if file.exists():
        for text in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if text.endswith("\n"):
                line = TrialLine(**json.loads(text))
                found[line.key] = line
    return list(found.values())


@dataclass(slots=True)
class TrialList:
    """Example: await TrialList(loop, tasks, 4, SessionKind.EVAL, file).run()"""

    loop: RunsTrials
    tasks: Sequence[Task]
    repeats: int
    kind: SessionKind
    file: Path
    """`trials.jsonl`."""
    concurrency: int = 8
    seed: int = 0
    proxy: ProxyClient | None = None
    """Where the rewards are posted; None: nowhere."""
    ended: Callable[[TrialLine], None] = lambda _: None
    """Called with each trial that this call of `run` has finished."""

    async def run(self) -> list[TrialLine]:
        """Runs the trials that are missing or failed; returns the lines of all."""
        drop_incomplete_line(self.file)
        done = {line.key for line in read_lines(self.file) if line.judged}
        slots = asyncio.Semaphore(self.concurrency)
        async with asyncio.TaskGroup() as running:
            for number, task in enumerate(self.tasks):
                for repeat in range(self.repeats):
                    if (task.agent, task.source, task.task_id, repeat) not in done:
                        seed = rollout_seed(self.seed, number, repeat)
                        running.create_task(self._one(task, repeat, seed, slots))
        wanted = {(task.agent, task.source, task.task_id) for task in self.tasks}
        return [
            line
            for line in read_lines(self.file)
            if line.key[:3] in wanted and line.repeat < self.repeats
        ]

    async def _one(self, task: Task, repeat: int, seed: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            rollout = await self.loop.run(task, kind=self.kind, seed=seed)
            await self._post(rollout)
            line = TrialLine(
                task.task_id,
                task.source,
                repeat,
                rollout.trial_id,
                rollout.status.value,
                rollout.reward,
                rollout.num_turns,
                rollout.error,
                task.agent,
            )
            fields: dict[str, Any] = {name: getattr(line, name) for name in line.__slots__}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
            self.ended(line)

    async def _post(self, rollout: Rollout) -> None:
        if self.proxy is not None and rollout.reward is not None:
            parts = dict(rollout.reward_parts)
            reward = Reward(TRIAL_REWARD, rollout.reward, parts)
            await self.proxy.add_reward(rollout.trial_id, reward)
