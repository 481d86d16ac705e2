"""Reads Harbor task folders as tasks, and finds the folder of a task for a Harbor trial.

A folder is a task if it holds a task.toml, an `environment/` and an instruction: instruction.md,
or one instruction in `steps/<name>/` for each step. The tasks are cached as a Parquet file, whose
name contains a hash of the files' contents. Invariant: a changed task is never read from the cache.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import orjson
from pydantic import BeforeValidator, Field

from agent_loop.errors import TaskFileError
from agent_loop.records import Task
from agent_loop.task_sources.protocol import TaskFolders
from proxy.settings.section import Common

TASK_FILE = "task.toml"
LOCAL_PATH = "local_task_path"
_ROW_VERSION = b"1"
"""Part of the cache's hash; to be changed whenever the format of the rows changes."""


def _one_or_more(value: Any) -> Any:
    """One folder, a list of folders, or folders separated as in PATH."""
    return tuple(filter(None, value.split(":"))) if isinstance(value, str) else value


Folders = Annotated[tuple[Path, ...], BeforeValidator(_one_or_more)]


class HarborDataConfig(TaskFolders):
    """Example: HarborDataConfig(train_dir="tasks/train", train_limit=100)"""

    train_dir: Common[Folders] = ()
    """Folders whose immediate subfolders are Harbor tasks to train on."""
    val_dir: Folders = ()
    """Folders whose immediate subfolders are held-out Harbor tasks."""
    cache_dir: Path | None = None
    """Folder for Parquet copies of the tasks; a copy is used as long as the task folders are
    unchanged, and can be deleted. None: read the task folders each time."""
    data_source: str = ""
    """Name of the source of the tasks; empty: the folder's name."""
    ability: str = "agent"
    """The value of the `ability` column in the tasks' data, as verl's datasets have it."""
    train_limit: int | None = Field(None, ge=1)
    """Number of tasks to use of each training folder, the first by name; None: all."""
    val_limit: int | None = Field(None, ge=1)
    """Number of tasks to use of each held-out folder, the first by name; None: all."""

    @property
    def train_folders(self) -> tuple[Path, ...]:
        return self.train_dir

    @property
    def val_folders(self) -> tuple[Path, ...]:
        return self.val_dir

    def train_tasks(self) -> list[Task]:
        read = (read_harbor_dir(root, self, self.train_limit) for root in self.train_dir)
        return [task for tasks in read for task in tasks]

    def val_tasks(self) -> list[Task]:
        read = (read_harbor_dir(root, self, self.val_limit) for root in self.val_dir)
        return [task for tasks in read for task in tasks]

    def training_as_held_out(self) -> Self:
        return self.model_copy(
            update={"val_dir": self.train_dir, "val_limit": self.train_limit, "train_dir": ()}
        )


def read_harbor_dir(root: Path, config: HarborDataConfig, limit: int | None = None) -> list[Task]:
    """The first `limit` tasks of the folder by name, or all of them.

    Raises:
        TaskFileError: the folder does not exist or holds no task, or a task is incomplete.
    """
    if not root.is_dir():
        raise TaskFileError(f"{root}: not a folder; give one that holds Harbor task folders")
    folders = sorted(path.parent for path in root.glob(f"*/{TASK_FILE}"))[:limit]
    if not folders:
        raise TaskFileError(f"{root}: no Harbor task in it (no subfolder holds {TASK_FILE})")
    rows = _rows(root, config, folders)
    source = config.data_source or root.name
    shared = {"data_source": source, "ability": config.ability}
    return [Task(row["task_id"], {**row, **shared}, source) for row in rows]


def resolve_task_dir(task: Task, roots: Sequence[Path], template: str = "") -> Path | None:
    """The task's folder: the first task folder among its `local_task_path`, `<instance_id>` in each
    of the roots, and the template with `{instance_id}` and `{task_id}` replaced; None if there is
    none.
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
        raise TaskFileError(f"{folder}: no environment/ in it; a Harbor task needs one")
    instructions = {name: _instruction(path) for name, path in _instructions(folder, config)}
    return {
        "task_id": folder.name,
        "instance_id": folder.name,
        LOCAL_PATH: str(folder.resolve()),
        "instruction": "\n\n".join(instructions.values()),
        "steps": [name for name in instructions if name],
        "metadata": _metadata(folder, config.get("metadata", {})),
    }


def _metadata(folder: Path, metadata: Any) -> str:
    """As JSON; dates and times of TOML as text."""
    try:
        return orjson.dumps(metadata, default=str).decode()
    except TypeError as error:
        raise TaskFileError(f"{folder / TASK_FILE}: metadata: {error}") from None


def _config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskFileError(f"{folder / TASK_FILE}: {error}; fix it or remove the task") from None


def _instructions(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """`(step name, file)`; the name is empty where the task has no steps."""
    steps = config.get("steps") or []
    named = isinstance(steps, list) and all(
        isinstance(step, dict) and isinstance(step.get("name"), str) for step in steps
    )
    if not named:
        raise TaskFileError(f"{folder / TASK_FILE}: each of its [[steps]] needs a name, as text")
    if not steps:
        yield "", folder / "instruction.md"
    for step in steps:
        yield step["name"], folder / "steps" / step["name"] / "instruction.md"


def _instruction(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskFileError(
            f"{path}: cannot read the instruction ({error.strerror}); a Harbor task needs "
            "instruction.md, or one in each folder of steps/"
        ) from None
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 ({error}); a Harbor task needs text") from None


def _rows(root: Path, config: HarborDataConfig, folders: Sequence[Path]) -> list[dict[str, Any]]:
    if config.cache_dir is None:
        return list(map(_row, folders))
    # Imported here: only the cache needs it, and it is one of the trainer's packages.
    import pyarrow
    from pyarrow import parquet

    path = config.cache_dir / f"{root.name}-{_signature(folders)}.parquet"
    if path.is_file():
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    rows = list(map(_row, folders))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished)
    unfinished.replace(path)
    return rows


def _signature(folders: Sequence[Path]) -> str:
    """A hash of everything that a row is made from: the folders' paths and the files' contents."""
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
