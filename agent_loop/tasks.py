"""Reads tasks from files, and draws them from weighted sources in an order that can be resumed.

Invariant: the n-th draw is a function of the sources, the seed and n alone. A stream restored
from a `Cursor` continues with exactly the tasks that the original stream would have drawn.

Each line of a JSONL file, or row of a Parquet file, is one JSON object. Its `task_id` (or `id`)
names the task and must be unique in the file; the default is `<source>-<line>`. The whole object is
the task's data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.harbor_tasks import HarborDataConfig, read_harbor_dir
from agent_loop.records import Task
from proxy.errors import ConfigurationError

Order = npt.NDArray[np.int64]

SHOWN_CHARS = 80
"""Maximum number of characters of a broken line in an error message, which is one line."""


class DataConfig(HarborDataConfig):
    """The `data` section of a run. Example: DataConfig(train_files=("tasks/train.jsonl",))"""

    train_files: tuple[Path, ...] = ()
    """Files of tasks to train on: JSONL, one object per line, or Parquet, one task per row."""
    val_files: tuple[Path, ...] = ()
    """Files of held-out tasks, for evaluation only."""
    weights: Mapping[str, float] = Field(default_factory=dict)
    """How often tasks of a source (a file's name without its ending) are drawn, relative to the
    others; default 1."""
    shuffle: bool = True
    """Shuffle the tasks of a source in each epoch; false: keep the order of the file."""
    seed: int = 0
    """Seed of the order of tasks."""


def training_tasks(data: DataConfig, *, needs_prompt: bool = False) -> TaskStream:
    """The stream of all tasks to train on.

    Raises:
        ConfigurationError: no task is configured, a weight names no source, a task has no prompt
            although the agent needs one, or (TaskFileError) a file cannot be read.
    """
    if not data.train_files and not data.train_harbor_dir:
        raise ConfigurationError(
            "data.train_files: missing; give at least one file of tasks, or a folder of "
            "Harbor tasks in data.train_harbor_dir"
        )
    read = {file.stem: read_tasks(file) for file in data.train_files}
    for root in data.train_harbor_dir:
        source = data.harbor_data_source or root.name
        tasks = read_harbor_dir(root, data, data.harbor_train_limit)
        read.setdefault(source, []).extend(tasks)
    if needs_prompt:
        _refuse_without_prompt(task for tasks in read.values() for task in tasks)
    unknown = set(data.weights) - read.keys()
    if unknown:
        raise ConfigurationError(
            f"data.weights: {sorted(unknown)} name no source; the sources are {list(read)}"
        )
    sources = [Source(name, tasks, data.weights.get(name, 1.0)) for name, tasks in read.items()]
    return TaskStream(sources, seed=data.seed, shuffle=data.shuffle)


def held_out_tasks(data: DataConfig, *, needs_prompt: bool = False) -> list[Task]:
    """All held-out tasks; the list may be empty.

    Raises:
        ConfigurationError: a file or folder is also used for training, a task has no prompt
            although the agent needs one, or (TaskFileError) a file cannot be read.
    """
    _refuse_shared(data.train_files, data.val_files, "files")
    _refuse_shared(data.train_harbor_dir, data.val_harbor_dir, "harbor_dir")
    tasks = [task for file in data.val_files for task in read_tasks(file)]
    for root in data.val_harbor_dir:
        tasks += read_harbor_dir(root, data, data.harbor_val_limit)
    if needs_prompt:
        _refuse_without_prompt(tasks)
    return tasks


def _refuse_without_prompt(tasks: Iterable[Task]) -> None:
    for task in tasks:
        if not task.prompt:
            raise ConfigurationError(
                f"task {task.task_id!r} of source {task.source!r} has no prompt, and "
                "remote_agent.command uses it ({prompt} or TASK_PROMPT); give each task a "
                '"prompt", "instruction" or "question", or use TASK_FILE in the command'
            )


def _refuse_shared(train: Sequence[Path], held_out: Sequence[Path], key: str) -> None:
    trained = {path.resolve() for path in train}
    both = [path for path in held_out if path.resolve() in trained]
    if both:
        raise ConfigurationError(
            f"data.val_{key}: {both[0]} is also in data.train_{key}; remove it from one of them"
        )


def read_jsonl(path: Path, source: str | None = None) -> list[Task]:
    """All tasks of a JSONL file. Empty lines are skipped.

    Raises:
        TaskFileError: the file is missing or empty, or a line is not a task.
    """
    source = source or path.stem
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TaskFileError(
            f"{path}: cannot read the task file ({error.strerror}); "
            "give the path of a JSONL file, one JSON object per line"
        ) from None
    rows = (
        (number, _parse(path, number, line))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    return _tasks(path, rows, source)


def read_parquet(path: Path, source: str | None = None) -> list[Task]:
    """All tasks of a Parquet file: each row is read like a line of a JSONL file.

    Raises:
        TaskFileError: it cannot be read, a row is not a task, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TaskFileError(
            f"{path}: reading Parquet needs pyarrow; install it, or give a JSONL file"
        ) from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise TaskFileError(f"{path}: cannot read it as Parquet: {reason}") from None
    return _tasks(path, enumerate(rows, start=1), source or path.stem)


def read_tasks(path: Path, source: str | None = None) -> list[Task]:
    """All tasks of a file: Parquet if its name ends with `.parquet`, else JSONL.

    Raises:
        TaskFileError: as `read_parquet` and `read_jsonl`.
    """
    return read_parquet(path, source) if path.suffix == ".parquet" else read_jsonl(path, source)


def _parse(path: Path, number: int, line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        shown = _shown(line.decode(errors="replace"))
        raise TaskFileError(
            f"{path}:{number}: not JSON ({error.msg}): {shown}; fix or remove the line"
        ) from None


def _tasks(path: Path, rows: Iterable[tuple[int, Any]], source: str) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, data in rows:
        task = _task(path, number, data, source)
        if task.task_id in tasks:
            raise TaskFileError(
                f"{path}:{number}: task_id {task.task_id!r} is used twice; give each its own"
            )
        tasks[task.task_id] = task
    if not tasks:
        raise TaskFileError(f"{path}: no task in it; write one JSON object per line")
    return list(tasks.values())


def _task(path: Path, number: int, data: Any, source: str) -> Task:
    if not isinstance(data, dict):
        raise TaskFileError(
            f"{path}:{number}: a task is a JSON object, but this is a {type(data).__name__}: "
            f'{_shown(str(data))}; write it like {{"task_id": "a-1", "prompt": "…"}}'
        )
    task_id = data.get("task_id", data.get("id", f"{source}-{number}"))
    if not isinstance(task_id, str | int) or task_id == "":
        raise TaskFileError(
            f"{path}:{number}: task_id {task_id!r} is not a name; use a non-empty string"
        )
    return Task(task_id=str(task_id), data=data, source=source)


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARS])


@dataclass(frozen=True, slots=True)
class Source:
    """Tasks under one name, drawn in proportion to `weight`.

    Example: Source("arithmetic", read_jsonl(Path("sums.jsonl"), "arithmetic"), weight=3.0)
    """

    name: str
    tasks: Sequence[Task]
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


class TaskStream:
    """An endless stream of tasks. Each epoch of a source is a new permutation of its tasks. The
    sources are mixed by their weights at any length of the stream, because each draw takes the
    source that is furthest behind its share.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, shuffle: bool = True) -> None:
        self._sources = {source.name: source for source in sources}
        if not sources or len(self._sources) != len(sources):
            names = [source.name for source in sources]
            raise TaskFileError(f"task sources {names}: give at least one, with different names")
        for source in sources:
            if not source.weight > 0 or not source.tasks:
                raise TaskFileError(
                    f"task source {source.name!r}: weight {source.weight}, {len(source.tasks)} "
                    "tasks; the weight must be greater than 0, and there must be at least 1 task"
                )
        self._total_weight = sum(source.weight for source in sources)
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[str, tuple[int, Order]] = {}
        self.cursor = Cursor({source.name: 0 for source in sources})

    def __len__(self) -> int:
        """Number of tasks in one epoch of all sources."""
        return sum(len(source.tasks) for source in self._sources.values())

    def draw(self) -> Task:
        source = self._furthest_behind()
        epoch, position = divmod(self.cursor.taken[source.name], len(source.tasks))
        self.cursor.taken[source.name] += 1
        return source.tasks[int(self._order(source, epoch)[position])]

    def restore(self, taken: Mapping[str, int]) -> None:
        """Continues after the draws in `taken`. A source that is missing in `taken` starts at the
        number of draws that its weight would have given it; otherwise it alone would be drawn
        until it had caught up.
        """
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

    def _order(self, source: Source, epoch: int) -> Order:
        cached = self._orders.get(source.name)
        if cached is None or cached[0] != epoch:
            order = np.arange(len(source.tasks))
            if self._shuffle:
                np.random.default_rng([self._seed, *source.name.encode(), epoch]).shuffle(order)
            cached = self._orders[source.name] = (epoch, order)
        return cached[1]
