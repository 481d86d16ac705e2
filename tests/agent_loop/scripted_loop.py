"""A loop with scripted trials, for the tests of producers and the evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.records import Origin, SessionKind
from tests.agent_loop.recorded import turn


@dataclass
class ScriptedLoop:
    """A trial lasts `duration(seed)` seconds of its event loop's clock. Its reward and its ids are
    functions of the task and the seed. Its version is the policy's version at the trial's start.
    """

    duration: Callable[[int], float] = lambda seed: 0.0
    task_duration: Callable[[Task], float] = lambda task: 0.0
    reward: Callable[[Task, int], float | None] = lambda task, seed: float(seed % 2)
    fails: Callable[[Task, int], bool] = lambda task, seed: False
    version_now: Callable[[], int] | None = None
    """If given, a trial has a second turn, which is sampled at its end by the version returned
    then."""
    running: int = 0
    most_running: int = 0
    kinds: list[SessionKind] = field(default_factory=list)
    started: int = 0
    cancelled: int = 0

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        self.started += 1
        self.kinds.append(kind)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.duration(seed) + self.task_duration(task))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        turns = [turn(0, None, 0, [1], [seed % 50, seed % 7], version=version)]
        if self.version_now:
            turns.append(turn(1, 0, 3, [2], [3], version=self.version_now()))
        failed = self.fails(task, seed)
        return Rollout(
            trial_id=f"{task.task_id}-{self.started}",
            task=task,
            status=RolloutStatus.FAILED if failed else RolloutStatus.DONE,
            reward=None if failed else self.reward(task, seed),
            segments=() if failed or kind is SessionKind.EVAL else build_segments(turns),
            num_turns=1,
            started_version=version,
            error="scripted failure" if failed else None,
            logs="nowhere",
            seed=seed,
        )


class ClosableLoop(ScriptedLoop):
    """For integrations into other trainers, which close their loop."""

    async def close(self) -> None:
        return
