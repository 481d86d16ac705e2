"""Harbor task folders as tasks, and a task as the folder that a Harbor trial is given.

A folder is a task when it has a task.toml, an `environment/` and its instruction: instruction.md,
or one in `steps/<name>/` for each of its steps. What was read is kept as Parquet under a name made
of the files' contents. Invariant: a changed task is never served from the cache.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agent_loop.errors import TaskFileError
from agent_loop.records import Task

TASK_FILE = "task.toml"
LOCAL_PATH = "local_task_path"
_ROW_VERSION = b"1"
"""Part of the cache's name: another one when the rows change their form."""


@dataclass(frozen=True, slots=True)
class HarborDataset:
    """Example: HarborDataset(Path("tasks/train"), source="files", limit=100)"""

    root: Path
    """Its immediate folders are the tasks."""
    source: str = ""
    """Name of the source; empty: the root's name."""
    ability: str = "agent"
    """Kept in the task's data, as verl's datasets have it."""
    limit: int | None = None
    """The first so many by name; None: all."""
    cache_dir: Path | None = None
    """None: read the folders each time."""
    overwrite: bool = False
    """Read the folders and write the cache anew."""


def read_harbor_dir(dataset: HarborDataset) -> list[Task]:
    """All tasks below the root, by name.

    Raises:
        TaskFileError: no such folder, no task in it, or a task that is not whole.
    """
    root = dataset.root
    if not root.is_dir():
        raise TaskFileError(f"{root}: not a folder; give one that holds Harbor task folders")
    folders = sorted(path.parent for path in root.glob(f"*/{TASK_FILE}"))[: dataset.limit]
    if not folders:
        raise TaskFileError(f"{root}: no Harbor task in it ({TASK_FILE} one folder below)")
    rows = _cached_rows(dataset, folders) if dataset.cache_dir else list(map(_row, folders))
    source = dataset.source or root.name
    shared = {"data_source": source, "ability": dataset.ability}
    return [Task(row["task_id"], {**row, **shared}, source) for row in rows]


def resolve_task_dir(task: Task, roots: Sequence[Path], template: str = "") -> Path | None:
    """Where the task's folder is: its own `local_task_path`, else `root/<instance_id>` below the
    first root that has it, else the template with `{instance_id}` and `{task_id}` put in; None
    when none of them is a task folder.
    """
    instance = str(task.data.get("instance_id") or task.task_id)
    candidates = [Path(root) / instance for root in roots]
    if local := task.data.get(LOCAL_PATH):
        candidates.insert(0, Path(str(local)))
    if template:
        filled = template.replace("{instance_id}", instance).replace("{task_id}", task.task_id)
        candidates.append(Path(filled))
    return next((path for path in candidates if (path / TASK_FILE).is_file()), None)


def _row(folder: Path) -> dict[str, Any]:
    config = _config(folder)
    if not (folder / "environment").is_dir():
        raise TaskFileError(f"{folder}: no environment/ in it, which a Harbor task has")
    instructions = {name: _instruction(path) for name, path in _instructions(folder, config)}
    return {
        "task_id": folder.name,
        "instance_id": folder.name,
        LOCAL_PATH: str(folder.resolve()),
        "instruction": "\n\n".join(instructions.values()),
        "steps": [name for name in instructions if name],
        "metadata": orjson.dumps(config.get("metadata", {}), default=str).decode(),
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / TASK_FILE).read_text())
    except (OSError, ValueError) as error:
        raise TaskFileError(f"{folder / TASK_FILE}: {error}; fix it or remove the task") from None


def _instructions(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """`(step name, file)`; the name is empty where the task has no steps."""
    steps = config.get("steps") or []
    if not steps:
        yield "", folder / "instruction.md"
    for step in steps:
        yield step["name"], folder / "steps" / step["name"] / "instruction.md"


def _instruction(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise TaskFileError(
            f"{path}: cannot read the instruction ({error.strerror}); a Harbor task has one, "
            "a task of several steps one for each of its steps"
        ) from None


def _cached_rows(dataset: HarborDataset, folders: Sequence[Path]) -> list[dict[str, Any]]:
    # Imported here: it is wanted by this alone, and comes with the trainer's packages.
    import pyarrow
    from pyarrow import parquet

    assert dataset.cache_dir is not None
    path = dataset.cache_dir / f"{dataset.root.name}-{_signature(folders)}.parquet"
    if path.is_file() and not dataset.overwrite:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    rows = list(map(_row, folders))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)
    unfinished.replace(path)
    return rows


def _signature(folders: Sequence[Path]) -> str:
    """Of everything that a row is made of: the folders' places and their files' contents."""
    digest = hashlib.sha256(_ROW_VERSION)
    for folder in folders:
        files = [folder / TASK_FILE, folder / "instruction.md"]
        files += sorted(folder.glob("steps/*/instruction.md"))
        for file in files:
            content = file.read_bytes() if file.is_file() else b""
            for part in (str(file.resolve()).encode(), content):
                digest.update(len(part).to_bytes(8) + part)
        digest.update(bytes([(folder / "environment").is_dir()]))
    return digest.hexdigest()[:16]
