"""Every task source, by its key under `data.train_sources.NAME` and `data.val_sources.NAME`.

To add a task source, write a module with its section (a `TaskSourceConfig`) and its class, and add
a field here, which names the class of its section, so that this is imported only if the key is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from agent_loop.records import Task
from agent_loop.task_sources.protocol import TaskSource, TaskSourceConfig
from proxy.settings.late_section import LateSection

_EXTRAS = "agent_loop.extras"


class AnyTaskSource(TaskSourceConfig):
    """Exactly one of the sources below. Example: AnyTaskSource(function="my_tasks:sums")"""

    limit: int | None = Field(None, ge=1)
    """Number of tasks of an epoch, the first ones; None: all."""
    function: Annotated[
        TaskSourceConfig | None, LateSection("agent_loop.task_sources.function:FunctionTasks")
    ] = None
    """A Python function that yields tasks."""
    dataset: Annotated[
        TaskSourceConfig | None, LateSection("agent_loop.task_sources.dataset:DatasetTasksConfig")
    ] = None
    """A Hugging Face dataset, of the hub or of a local folder."""
    verifiers: Annotated[
        TaskSourceConfig | None, LateSection(f"{_EXTRAS}.environments.task_source:VerifiersTasks")
    ] = None
    """The tasks of an environment of the package `verifiers`."""
    harbor: Annotated[
        TaskSourceConfig | None, LateSection(f"{_EXTRAS}.harbor.task_source:HarborTasks")
    ] = None
    """A dataset of a Harbor registry."""
    resets: Annotated[
        TaskSourceConfig | None, LateSection(f"{_EXTRAS}.environments.task_source:ResetTasks")
    ] = None
    """Resets of an OpenEnv environment with seeds."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if len(self._sources()) != 1:
            kinds = [name for name in type(self).model_fields if name != "limit"]
            raise ValueError(
                f"a task source has exactly one of the keys {', '.join(kinds)}; "
                f"this one has {list(self._sources()) or 'none'}"
            )
        return self

    @property
    def private_files(self) -> tuple[Path, ...]:
        return next(iter(self._sources().values())).private_files

    def build(self, name: str, *, seed: int, shuffle: bool) -> TaskSource:
        source = next(iter(self._sources().values())).build(name, seed=seed, shuffle=shuffle)
        return source if self.limit is None else FirstTasks(source, self.limit)

    def _sources(self) -> dict[str, TaskSourceConfig]:
        return {name: value for name, value in self if isinstance(value, TaskSourceConfig)}


class FirstTasks:
    """The first tasks of each epoch of a source."""

    def __init__(self, source: TaskSource, limit: int) -> None:
        self._source = source
        self._limit = limit

    def epoch(self, number: int) -> Iterator[Task]:
        return islice(self._source.epoch(number), self._limit)
