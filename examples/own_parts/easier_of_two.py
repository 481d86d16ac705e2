"""A producer: draws two tasks and tries the easier one (`rollout.producer`).

The synchronous producer does the rest: trials, groups, and the state in a checkpoint.
"""

from __future__ import annotations

from agent_loop.producers.protocol import RunsTrials
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import Task
from agent_loop.tasks import TaskStream


class EasierOfTwo(SyncProducer):
    def draw(self) -> Task:
        return min((super().draw(), super().draw()), key=lambda task: task.data["level"])


def easier_of_two(
    loop: RunsTrials, tasks: TaskStream, config: RolloutConfig, seed: int
) -> EasierOfTwo:
    return EasierOfTwo(loop, tasks, config, seed=seed)
