"""The task source `function`: a Python function that yields tasks, such as a generator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.errors import TaskFileError
from agent_loop.outside_parts import OwnFunction
from agent_loop.processes.functions import source_file
from agent_loop.records import Task
from agent_loop.task_sources.files import task_of
from agent_loop.task_sources.protocol import TaskSourceConfig


class FunctionTasks(OwnFunction, TaskSourceConfig):
    """A function that yields the data of each task: `def tasks(seed: int) -> Iterable[dict]`. It is
    called once for each epoch, with another seed; it may be endless.

    Example: FunctionTasks(target="my_tasks:sums", settings={"digits": 3})
    """

    kind = "task_source"

    def __call__(self, seed: int) -> Iterable[Mapping[str, Any]]:
        rows: Iterable[Mapping[str, Any]] = self.called(seed)
        return rows

    @property
    def private_files(self) -> tuple[Path, ...]:
        file = source_file(self.target)
        return () if file is None else (file,)

    def build(self, name: str, *, seed: int, shuffle: bool) -> GeneratedTasks:
        """The function itself decides on the order, by its seed."""
        return GeneratedTasks(name, self, seed)


class GeneratedTasks:
    """Calls the function once per epoch."""

    def __init__(self, name: str, function: FunctionTasks, seed: int) -> None:
        self._name = name
        self._function = function
        self._seed = seed

    def epoch(self, number: int) -> Iterator[Task]:
        seed = int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])
        rows = self._function(seed)
        if not isinstance(rows, Iterable):
            raise TaskFileError(
                f"{self._function.target} returned a {type(rows).__name__}; it must yield tasks"
            )
        for place, row in enumerate(rows, start=1):
            where = f"{self._function.target}, task {place} of seed {seed}"
            task_id = f"{self._name}-{number}-{place}"
            data = {"task_id": task_id, **row} if isinstance(row, Mapping) else row
            yield task_of(data, self._name, place, where)
