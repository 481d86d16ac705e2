"""Draws tasks from weighted sources in an order that can be resumed.

Invariant: the n-th draw is a function of the sources, the seed and n alone. A stream restored
from a `Cursor` continues with exactly the tasks that the original stream would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Self

import orjson
from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.launchers.protocol import LauncherConfig
from agent_loop.records import Task
from agent_loop.task_sources.files import read_tasks
from agent_loop.task_sources.listed import ListedTasks
from agent_loop.task_sources.protocol import (
    ListsTasks,
    Position,
    PositionedSource,
    PositionedTasks,
    TaskFolders,
    TaskSource,
)
from agent_loop.task_sources.registry import AnyTaskSource
from proxy.errors import ConfigurationError
from proxy.settings.late_section import LateSection
from proxy.settings.section import Common, Section

MAX_HELD_OUT = 100_000
"""Maximum number of held-out tasks of a source, which all are evaluated: a source with more is
probably endless."""


class DataConfig(Section):
    """The `data` section of a run. Example: DataConfig(train_files=("tasks/train.jsonl",))"""

    train_files: Common[tuple[Path, ...]] = ()
    """Files of tasks to train on: JSONL, one object per line, or Parquet, one task per row."""
    val_files: Common[tuple[Path, ...]] = ()
    """Files of held-out tasks, for evaluation only."""
    train_sources: Common[Mapping[str, AnyTaskSource]] = Field(default_factory=dict)
    """Other sources of tasks to train on, by their names: `train_sources.NAME.function`, …"""
    val_sources: Mapping[str, AnyTaskSource] = Field(default_factory=dict)
    """Other sources of held-out tasks, by their names; an endless one needs a `limit`."""
    harbor: Annotated[
        TaskFolders | None, LateSection("agent_loop.extras.harbor.task_folders:HarborDataConfig")
    ] = None
    """Folders of Harbor tasks: `harbor.train_dir`, `harbor.val_dir`."""
    weights: Mapping[str, float] = Field(default_factory=dict)
    """How often tasks of a source (a file's name without its ending, or the name of another
    source) are drawn, relative to the others; default 1."""
    shuffle: bool = True
    """Shuffle the tasks of a source in each epoch; false: keep the order of the file."""
    seed: Common[int] = Field(0, ge=0)
    """Seed of the order of tasks."""
    agent_field: str = "agent"
    """With several `agents`: the field of a task that names its agent, if the task has it."""

    @property
    def holds_tasks(self) -> bool:
        """Whether it names any task, to train on or held out."""
        named = (self.train_files, self.val_files, self.train_sources, self.val_sources)
        return any((*named, self._folders(held_out=False), self._folders(held_out=True)))

    @property
    def private_files(self) -> tuple[Path, ...]:
        """What local agents must not read: the files and folders of tasks."""
        sources = (*self.train_sources.values(), *self.val_sources.values())
        own = [path for source in sources for path in source.private_files]
        folders = (*self._folders(held_out=False), *self._folders(held_out=True))
        return (*self.train_files, *self.val_files, *folders, *own)

    def training_as_held_out(self) -> Self:
        """The same tasks, of which those to train on are the held-out ones."""
        return self.model_copy(
            update={
                "val_files": self.train_files,
                "val_sources": self.train_sources,
                "harbor": self.harbor and self.harbor.training_as_held_out(),
                "train_files": (),
                "train_sources": {},
            }
        )

    @property
    def names_training_tasks(self) -> bool:
        return bool(self.train_files or self.train_sources or self._folders(held_out=False))

    @property
    def names_held_out_tasks(self) -> bool:
        return bool(self.val_files or self.val_sources or self._folders(held_out=True))

    def _folders(self, *, held_out: bool) -> tuple[Path, ...]:
        if self.harbor is None:
            return ()
        return self.harbor.val_folders if held_out else self.harbor.train_folders


def with_own_tasks(data: DataConfig, agent: LauncherConfig | None) -> DataConfig:
    """The section `data`, with the tasks of the agent's environment if it names no tasks to train
    on. With them, `remote_agent.verifiers.env: gsm8k-v1` is a whole task set."""
    own = agent.own_tasks if agent is not None else None
    if own is None or data.names_training_tasks:
        return data
    update = {"train_sources": {own.name: AnyTaskSource.model_validate(own.train)}}
    if own.held_out is not None and not data.names_held_out_tasks:
        update["val_sources"] = {own.name: AnyTaskSource.model_validate(own.held_out)}
    return data.model_copy(update=update)


def training_tasks(data: DataConfig, *, needs_prompt: bool = False) -> TaskStream:
    """The stream of all tasks to train on.

    Raises:
        ConfigurationError: as `training_sources`.
    """
    sources = training_sources(data, needs_prompt=needs_prompt)
    return TaskStream(sources, seed=data.seed, needs_prompt=needs_prompt)


def training_sources(data: DataConfig, *, needs_prompt: bool = False) -> list[Source]:
    """The sources of all tasks to train on, with their weights.

    Raises:
        ConfigurationError: no task is configured, two files have one name, a weight names no
            source, a task has no prompt although the agent needs one, or (TaskFileError) a file
            cannot be read.
    """
    if not data.names_training_tasks:
        raise ConfigurationError(
            "data.train_files: missing; give at least one file of tasks, or a folder of "
            "Harbor tasks in data.harbor.train_dir, or another source in data.train_sources"
        )
    _refuse_one_name(data.train_files)
    read: dict[str, list[Task]] = {file.stem: read_tasks(file) for file in data.train_files}
    for task in data.harbor.train_tasks() if data.harbor else ():
        read.setdefault(task.source, []).append(task)
    if needs_prompt:
        refuse_without_prompt(task for tasks in read.values() for task in tasks)
    if both := sorted(read.keys() & data.train_sources.keys()):
        raise ConfigurationError(
            f"data.train_sources: {both} is also the name of a file or folder of tasks; rename it"
        )
    found: dict[str, TaskSource] = {
        name: ListedTasks(name, tasks, seed=data.seed, shuffle=data.shuffle)
        for name, tasks in read.items()
    }
    for name, section in data.train_sources.items():
        found[name] = section.build(name, seed=data.seed, shuffle=data.shuffle)
    unknown = set(data.weights) - found.keys()
    if unknown:
        raise ConfigurationError(
            f"data.weights: {sorted(unknown)} name no source; the sources are {list(found)}"
        )
    return [Source(name, tasks, data.weights.get(name, 1.0)) for name, tasks in found.items()]


def held_out_tasks(data: DataConfig, *, needs_prompt: bool = False) -> list[Task]:
    """All held-out tasks; the list may be empty.

    Raises:
        ConfigurationError: a file, folder or source is also used for training, two tasks of one
            source have one id, a task has no prompt although the agent needs one, or
            (TaskFileError) a file cannot be read.
    """
    _refuse_shared(data.train_files, data.val_files, "{}_files")
    _refuse_shared(data._folders(held_out=False), data._folders(held_out=True), "harbor.{}_dir")
    tasks = [task for file in data.val_files for task in read_tasks(file)]
    tasks += data.harbor.val_tasks() if data.harbor else []
    for name, section in data.val_sources.items():
        if section in data.train_sources.values():
            raise ConfigurationError(
                f"data.val_sources.{name}: data.train_sources has the same source; use another "
                "split, or other settings"
            )
        tasks += _all_tasks(name, section, data.seed)
    _refuse_same_ids(tasks)
    if needs_prompt:
        refuse_without_prompt(tasks)
    return tasks


def _all_tasks(name: str, section: AnyTaskSource, seed: int) -> list[Task]:
    """The tasks of a held-out source, each with its own id."""
    epoch = section.build(name, seed=seed, shuffle=False).epoch(0)
    tasks = list(islice(epoch, MAX_HELD_OUT + 1))
    if len(tasks) > MAX_HELD_OUT:
        raise TaskFileError(
            f"data.val_sources.{name}: more than {MAX_HELD_OUT} tasks; set "
            f"data.val_sources.{name}.limit to the number of tasks to evaluate"
        )
    if not tasks:
        raise TaskFileError(f"data.val_sources.{name}: the source has no task")
    if len({task.task_id for task in tasks}) < len(tasks):
        raise TaskFileError(f"data.val_sources.{name}: several tasks have the same task_id")
    return tasks


def refuse_without_prompt(tasks: Iterable[Task]) -> None:
    """Raises ConfigurationError: a task has no prompt."""
    for task in tasks:
        if not task.prompt:
            raise ConfigurationError(
                f"task {task.task_id!r} of source {task.source!r} has no prompt, and "
                "remote_agent.command uses it ({prompt} or TASK_PROMPT); give each task a "
                '"prompt", "instruction" or "question", or use TASK_FILE in the command'
            )


def _refuse_one_name(files: Sequence[Path]) -> None:
    """Raises ConfigurationError: two files would be the same source."""
    first: dict[str, Path] = {}
    for file in files:
        if (other := first.setdefault(file.stem, file)) is not file:
            raise ConfigurationError(
                f"data.train_files: {other} and {file} have the same name, {file.stem!r}, by which "
                "their tasks are drawn; rename one of them, or join them in one file"
            )


def _refuse_same_ids(tasks: Iterable[Task]) -> None:
    """Raises ConfigurationError: two tasks would count as one."""
    found: set[tuple[str, str]] = set()
    for task in tasks:
        if (task.source, task.task_id) in found:
            raise ConfigurationError(
                f"held-out tasks: two of the source {task.source!r} have the task_id "
                f"{task.task_id!r}, so that they would count as one; rename one of the files or "
                "folders of this name, or give each task its own task_id"
            )
        found.add((task.source, task.task_id))


def _refuse_shared(train: Sequence[Path], held_out: Sequence[Path], key: str) -> None:
    """`key` is the name of both keys, with `{}` where they differ."""
    trained = {path.resolve() for path in train}
    both = [path for path in held_out if path.resolve() in trained]
    if both:
        raise ConfigurationError(
            f"data.{key.format('val')}: {both[0]} is also in data.{key.format('train')}; "
            "remove it from one of them"
        )


NAMES = frozenset(
    ("task_id", "id", "instance_id", "local_task_path", "data_source", "ability", "agent")
)
"""Fields of a task that say where it is from and not what is asked; of those of Harbor's, too."""


def trained_too(held_out: Iterable[Task], train: Iterable[Task]) -> list[Task]:
    """The held-out tasks that are also tasks to train on: under whatever name, the same is asked
    and the rest of the data is the same. Tasks without a prompt are compared with their names."""
    trained = {_content(task) for task in train}
    return [task for task in held_out if _content(task) in trained]


def _content(task: Task) -> bytes:
    said = {name: value for name, value in task.data.items() if name not in NAMES}
    content = orjson.dumps(
        said if task.prompt.strip() else dict(task.data), default=repr, option=_AS_GIVEN
    )
    return hashlib.sha256(content).digest()


_AS_GIVEN = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks under one name, drawn in proportion to `weight`.

    Example: Source("arithmetic", read_jsonl(Path("sums.jsonl"), "arithmetic"), weight=3.0)
    """

    name: str
    tasks: Sequence[Task] | TaskSource
    weight: float = 1.0


@dataclass(slots=True)
class Cursor:
    """The position of a stream: the number of draws per source.

    Example: Cursor(taken={"arithmetic": 96, "shell": 32})
    """

    taken: dict[str, int] = field(default_factory=dict)

    @property
    def draws(self) -> int:
        return sum(self.taken.values())


def read_lazily(source: Source, *, seed: int, shuffle: bool) -> TaskSource:
    """The tasks of the source; `seed` and `shuffle` are for tasks in memory alone."""
    if isinstance(source.tasks, Sequence):
        return ListedTasks(source.name, source.tasks, seed=seed, shuffle=shuffle)
    return source.tasks


class TaskStream:
    """An endless stream of tasks. Each epoch of a source is a new permutation of its tasks. The
    sources are mixed by their weights at any length of the stream, because each draw takes the
    source that is furthest behind its share.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        shuffle: bool = True,
        needs_prompt: bool = False,
    ) -> None:
        """With `needs_prompt`, a task without a prompt is refused when it is drawn."""
        self._sources = {source.name: source for source in sources}
        if not sources or len(self._sources) != len(sources):
            names = [source.name for source in sources]
            raise TaskFileError(f"task sources {names}: give at least one, with different names")
        for source in sources:
            if not source.weight > 0:
                raise TaskFileError(
                    f"task source {source.name!r}: weight {source.weight}; the weight must be "
                    "greater than 0"
                )
        self._total_weight = sum(source.weight for source in sources)
        self._needs_prompt = needs_prompt
        self._draws = {
            name: _Draws(
                name,
                read_lazily(source, seed=seed, shuffle=shuffle),
            )
            for name, source in self._sources.items()
        }
        self.cursor = Cursor(dict.fromkeys(self._sources, 0))

    def draw(self) -> Task:
        """The next task.

        Raises:
            ConfigurationError: the source has no task, or the task has no prompt.
        """
        name = self._furthest_behind().name
        task = self._draws[name].task(self.cursor.taken[name])
        self.cursor.taken[name] += 1
        if self._needs_prompt:
            refuse_without_prompt([task])
        return task

    def listed(self) -> Iterator[Task]:
        """Each task once, of the sources that are in memory."""
        for source in self._sources.values():
            if isinstance(source.tasks, Sequence):
                yield from source.tasks
            elif isinstance(source.tasks, ListsTasks):
                yield from source.tasks.listed

    def state(self) -> dict[str, Any]:
        """The number of draws of each source, with the source's position if it knows one: JSON
        values from which `restore` continues."""
        positions = {name: draws.position for name, draws in self._draws.items()}
        return {
            name: count if (at := positions[name]) is None else {"taken": count, "position": at}
            for name, count in self.cursor.taken.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after a `state`. A source that is missing in it starts at the number of draws
        that its weight would have given it; otherwise it alone would be drawn until it had caught
        up.
        """
        taken: dict[str, int] = {}
        for name, saved in state.items():
            taken[name] = saved["taken"] if isinstance(saved, Mapping) else saved
            if isinstance(saved, Mapping) and name in self._draws:
                self._draws[name].seek(saved["position"])
        known = {name: count for name, count in taken.items() if name in self._sources}
        weight = sum(self._sources[name].weight for name in known)
        share = sum(known.values()) / weight if weight else 0.0
        self.cursor = Cursor(
            {
                name: known.get(name, int(share * source.weight))
                for name, source in self._sources.items()
            }
        )

    def _furthest_behind(self) -> Source:
        draws = self.cursor.draws + 1
        return max(
            self._sources.values(),
            key=lambda source: (
                source.weight / self._total_weight * draws - self.cursor.taken[source.name]
            ),
        )


class _Draws:
    """The draws of a source by number. It reads forward, through epoch after epoch, and starts
    again at the first epoch for a number that is behind it."""

    def __init__(self, name: str, source: TaskSource) -> None:
        self._name = name
        self._source = source
        self._tasks: Iterator[Task] = iter(())
        self._restart()

    @property
    def position(self) -> Position | None:
        """Where the next draw is, as JSON values; None if the source has no positions."""
        if not isinstance(self._tasks, PositionedTasks):
            return None
        return {"read": self._read, "epoch": self._epoch, "tasks": self._tasks.position}

    def seek(self, position: Position) -> None:
        """Continues at a position, without reading what is before it."""
        if isinstance(self._source, PositionedSource):
            self._read, self._epoch = position["read"], position["epoch"]
            self._tasks = self._source.continued(self._epoch - 1, position["tasks"])

    def task(self, number: int) -> Task:
        if number < self._read:
            self._restart()
        while True:
            task = self._next()
            if self._read > number:
                return task

    def _restart(self) -> None:
        self._read = self._epoch = 0
        self._tasks = iter(())

    def _next(self) -> Task:
        task = next(self._tasks, None)
        if task is None:
            self._tasks = iter(self._source.epoch(self._epoch))
            task = next(self._tasks, None)
            if task is None:
                raise TaskFileError(
                    f"task source {self._name!r}: epoch {self._epoch} has no task; a source must "
                    "have at least 1 task"
                )
            self._epoch += 1
        self._read += 1
        return task
