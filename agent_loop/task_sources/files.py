"""Reads files of tasks: JSONL and Parquet.

Each line of a JSONL file, or row of a Parquet file, is one JSON object. Its `task_id` (or `id`)
names the task and must be unique in the file; the default is `<source>-<line>`. The whole object is
the task's data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from agent_loop.errors import TaskFileError
from agent_loop.records import Task

SHOWN_CHARS = 80
"""Maximum number of characters of a broken line in an error message, which is one line."""


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
    try:  # programs get tasks as JSON
        plain = [orjson.loads(orjson.dumps(row)) for row in rows]
    except TypeError as error:
        raise TaskFileError(
            f"{path}: a row cannot be written as JSON ({error}); leave that column out"
        ) from None
    return _tasks(path, enumerate(plain, start=1), source or path.stem)


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
        task = task_of(data, source, number, f"{path}:{number}")
        if task.task_id in tasks:
            raise TaskFileError(
                f"{path}:{number}: task_id {task.task_id!r} is used twice; give each its own"
            )
        tasks[task.task_id] = task
    if not tasks:
        raise TaskFileError(f"{path}: no task in it; write one JSON object per line")
    return list(tasks.values())


def task_of(data: Any, source: str, number: int, where: str) -> Task:
    """The task that a row describes; `number` is the row's number in its source, and `where` its
    place, for messages.

    Raises:
        TaskFileError: the row is not a task.
    """
    if not isinstance(data, dict):
        raise TaskFileError(
            f"{where}: a task is a JSON object, but this is a {type(data).__name__}: "
            f'{_shown(str(data))}; write it like {{"task_id": "a-1", "prompt": "…"}}'
        )
    task_id = data.get("task_id", data.get("id", f"{source}-{number}"))
    if not isinstance(task_id, str | int) or task_id == "":
        raise TaskFileError(f"{where}: task_id {task_id!r} is not a name; use a non-empty string")
    return Task(task_id=str(task_id), data=data, source=source)


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARS])
