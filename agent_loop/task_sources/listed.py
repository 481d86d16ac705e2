"""Tasks in memory, as a source: what files and small environments list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from agent_loop.records import Task

Order = npt.NDArray[np.int64]


class ListedTasks:
    """Tasks in memory, in another order in each epoch, or in the order of the list."""

    def __init__(self, name: str, tasks: Sequence[Task], *, seed: int, shuffle: bool) -> None:
        self._name = name
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle

    @property
    def listed(self) -> Sequence[Task]:
        """All of its tasks, in the order of the list."""
        return self._tasks

    def epoch(self, number: int) -> Iterator[Task]:
        order: Order = np.arange(len(self._tasks))
        if self._shuffle:
            np.random.default_rng([self._seed, *self._name.encode(), number]).shuffle(order)
        return (self._tasks[int(place)] for place in order)
