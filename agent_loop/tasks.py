"""Tasks: read from files, drawn from weighted sources in an order that a small cursor resumes.

Invariant: the n-th draw is a function of the sources, the seed and n alone. A stream restored
from its `Cursor` continues with exactly the tasks that the first one would have drawn.

A line of a JSONL file (a row of a Parquet file) is one JSON object. Its `task_id` (or `id`) names
the task, and must be unique in the file; without one it is `<source>-<line>`. The object as a
whole is the task's data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from agent_loop.errors import TaskFileError
from agent_loop.records import Task

Order = npt.NDArray[np.int64]

SHOWN_CHARS = 80
"""Of a broken line, so that the message stays one line."""


def read_jsonl(path: Path, source: str | None = None) -> list[Task]:
    """All tasks of a JSONL file, empty lines skipped.

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
    """All rows of a Parquet file, each as a line of a JSONL file would be.

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
    """By the file's ending: `.parquet`, else JSONL. Raises TaskFileError."""
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
            f"{path}:{number}: a task is a JSON object, this is {type(data).__name__}: "
            f'{_shown(str(data))}; write it like {{"task_id": "a-1", "prompt": "…"}}'
        )
    task_id = data.get("task_id", data.get("id", f"{source}-{number}"))
    if not isinstance(task_id, str | int) or task_id == "":
        raise TaskFileError(
            f"{path}:{number}: task_id {task_id!r} is not a name; give a non-empty string"
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
    """How far a stream is: draws so far, per source.

    Example: Cursor(taken={"arithmetic": 96, "shell": 32})
    """

    taken: dict[str, int] = field(default_factory=dict)

    @property
    def draws(self) -> int:
        return sum(self.taken.values())


class TaskStream:
    """Endless draws. A source's epochs are each a fresh permutation; the mix of sources keeps to
    the weights at every prefix (each draw goes to the source that is furthest behind its share).
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, shuffle: bool = True) -> None:
        self._sources = {source.name: source for source in sources}
        if not sources or len(self._sources) != len(sources):
            names = [source.name for source in sources]
            raise TaskFileError(f"task sources {names}: give at least one, each with its own name")
        for source in sources:
            if not source.weight > 0 or not source.tasks:
                raise TaskFileError(
                    f"task source {source.name!r}: weight {source.weight}, {len(source.tasks)} "
                    "tasks; the weight must be above 0 and there must be a task"
                )
        self._total_weight = sum(source.weight for source in sources)
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[str, tuple[int, Order]] = {}
        self.cursor = Cursor({source.name: 0 for source in sources})

    def __len__(self) -> int:
        """Tasks in one epoch of all sources."""
        return sum(len(source.tasks) for source in self._sources.values())

    def draw(self) -> Task:
        source = self._furthest_behind()
        epoch, position = divmod(self.cursor.taken[source.name], len(source.tasks))
        self.cursor.taken[source.name] += 1
        return source.tasks[int(self._order(source, epoch)[position])]

    def restore(self, taken: Mapping[str, int]) -> None:
        """Continues behind `taken`. A source that the cursor does not know starts level with the
        others' share, so that it is not drawn alone until it has caught up.
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
