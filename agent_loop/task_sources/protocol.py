"""The interface of a task source: it yields tasks, epoch by epoch, without holding them all.

Invariant: the tasks of an epoch are a function of the source's settings, its seed and the epoch's
number, so that a resumed run continues with the tasks that it would have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from agent_loop.records import Task
from proxy.settings.section import Section

Position = Mapping[str, Any]
"""Where an iterator of tasks is, as JSON values."""


class TaskSource(Protocol):
    """Implementations: see `registry.py`. Files of tasks are read whole (`files.py`)."""

    def epoch(self, number: int) -> Iterator[Task]:
        """The tasks of the epoch with that number, from 0, in the order in which they are drawn.
        They are read one by one, and may be endless. The caller may stop early."""
        ...


@runtime_checkable
class ListsTasks(Protocol):
    """A source that may have its tasks in memory."""

    @property
    def listed(self) -> Sequence[Task]:
        """All of its tasks; empty if they are not in memory."""
        ...


@runtime_checkable
class PositionedTasks(Protocol):
    """An iterator over the tasks of an epoch that knows its position."""

    @property
    def position(self) -> Position:
        """Where the next task is."""
        ...

    def __iter__(self) -> Iterator[Task]: ...

    def __next__(self) -> Task: ...


@runtime_checkable
class PositionedSource(Protocol):
    """A source that continues at a position. A resumed run reads other sources from the start of
    the first epoch to the position."""

    def epoch(self, number: int) -> PositionedTasks: ...

    def continued(self, number: int, position: Position) -> PositionedTasks:
        """The tasks of an epoch from the position that another iterator over it had."""
        ...


class TaskSourceConfig(Section):
    """The section of a task source. Example: FunctionTasks(target="my_tasks:sums").build("sums")"""

    @property
    def private_files(self) -> tuple[Path, ...]:
        """Files and folders of the source that are empty for local agents."""
        return ()

    def build(self, name: str, *, seed: int, shuffle: bool) -> TaskSource:
        """The source with that name, which its tasks get as their `source`. `seed` and `shuffle`
        are those of the section `data`; held-out tasks are not shuffled.

        Raises ConfigurationError: these settings cannot work on this machine.
        """
        raise NotImplementedError


class TaskFolders(Section):
    """A section of `data` for tasks that are folders. Implementation: Harbor's."""

    @property
    def train_folders(self) -> tuple[Path, ...]:
        """The folders of tasks to train on."""
        return ()

    @property
    def val_folders(self) -> tuple[Path, ...]:
        """The folders of held-out tasks."""
        return ()

    def train_tasks(self) -> list[Task]:
        """The tasks to train on, each with its source. Raises TaskFileError: one is incomplete."""
        raise NotImplementedError

    def val_tasks(self) -> list[Task]:
        """The held-out tasks. Raises TaskFileError: one is incomplete."""
        raise NotImplementedError

    def training_as_held_out(self) -> Self:
        """The same folders, of which those to train on are the held-out ones."""
        raise NotImplementedError
