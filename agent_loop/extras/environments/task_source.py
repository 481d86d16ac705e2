"""Tasks of environments: those that a `verifiers` environment lists, and resets of OpenEnv."""

from __future__ import annotations

from itertools import islice

from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.extras.environments.verifiers import VerifiersEnvironment
from agent_loop.records import Task
from agent_loop.task_sources.files import task_of
from agent_loop.task_sources.listed import ListedTasks
from agent_loop.task_sources.protocol import TaskSourceConfig
from proxy.settings.section import Section

MAX_TASKS = 10_000
"""Maximum number of tasks of a `verifiers` environment, which are held in memory: one that has more
may be endless."""


class TaskRange(Section):
    """Of environments whose tasks are numbered."""

    skip: int = Field(0, ge=0)
    """Number of tasks (seeds of `resets`), the first ones, that are left out."""
    take: int = Field(MAX_TASKS, ge=1, le=MAX_TASKS)
    """Maximum number of tasks after those."""


class VerifiersTasks(VerifiersEnvironment, TaskRange, TaskSourceConfig):
    """The tasks of a `verifiers` environment.

    Example: VerifiersTasks(env="gsm8k-v1", skip=100).build("gsm8k", seed=0, shuffle=True)
    """

    def build(self, name: str, *, seed: int, shuffle: bool) -> ListedTasks:
        """
        Raises:
            TaskFileError: the environment cannot list its tasks, or has none after `skip`.
        """
        rows = list(islice(self.tasks(self.skip + self.take), self.skip, None))
        if not rows:
            raise TaskFileError(
                f"verifiers environment {self.env!r} has no task after the first {self.skip}"
            )
        tasks = [
            task_of(dict(row), name, number, f"verifiers environment {self.env!r}, task {number}")
            for number, row in enumerate(rows, start=self.skip)
        ]
        return ListedTasks(name, tasks, seed=seed, shuffle=shuffle)


class ResetTasks(TaskRange, TaskSourceConfig):
    """Resets of an OpenEnv environment with successive seeds.

    Example: ResetTasks(skip=100, take=1000).build("wordle", seed=0, shuffle=True)
    """

    take: int = Field(1000, ge=1, le=1_000_000)

    def build(self, name: str, *, seed: int, shuffle: bool) -> ListedTasks:
        tasks = [
            Task(f"{name}-{number}", {"reset": {"seed": number}}, name)
            for number in range(self.skip, self.skip + self.take)
        ]
        return ListedTasks(name, tasks, seed=seed, shuffle=shuffle)
