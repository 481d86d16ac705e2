"""The task source `dataset`: a Hugging Face dataset, of the hub or of a local folder, row by row.

Invariant: a dataset is never read as a whole. An epoch holds one window of rows, and the row group
(Parquet) or the batch (other formats) at its position. From the position of an iterator, another
one continues with exactly the same tasks. Parquet continues at the position's row group; of another
format, the file is read up to the position, but its rows are not converted.

The seed determines the order of the files in an epoch, of the row groups of each file, and of the
rows of each window of `shuffle_rows`.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import Field

from agent_loop.errors import TaskFileError
from agent_loop.records import Task
from agent_loop.task_sources.files import task_of
from agent_loop.task_sources.protocol import Position, TaskSourceConfig
from proxy.errors import ConfigurationError
from proxy.settings.hub import HUB, download

BATCH_ROWS = 1000
"""Rows of a Parquet row group that are converted at once; a group can have a million."""
SAVED = frozenset({"state.json", "dataset_dict.json"})
"""Files of a folder that `Dataset.save_to_disk` wrote."""

Row = Mapping[str, Any]


class DatasetTasksConfig(TaskSourceConfig):
    """A dataset whose rows are tasks, read while the run needs them.

    Example: DatasetTasksConfig(path="hf://openai/gsm8k", name="main",
                                columns={"prompt": "question"}).build("gsm8k", seed=0, shuffle=True)
    """

    path: str = Field(min_length=1)
    """`hf://owner/name` or `hf://owner/name@revision` on the Hugging Face hub; or a local folder or
    file of Parquet, JSON Lines, CSV or Arrow, or a folder that `save_to_disk` wrote."""
    name: str | None = None
    """Configuration (subset) of a dataset of the hub."""
    split: str = "train"
    """Split of the dataset. Files whose names contain no split are all `train`."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Field of the task → column of the dataset; `a.b` is the entry `b` of the column `a`. Empty:
    every column, under its own name."""
    shuffle_rows: int = Field(1000, ge=1)
    """Rows that are read at once and shuffled among each other, with `data.shuffle`."""

    @property
    def local_path(self) -> Path | None:
        """The local folder or file; None for a dataset of the hub."""
        return None if self.path.startswith(HUB) else Path(self.path)

    @property
    def private_files(self) -> tuple[Path, ...]:
        return () if self.local_path is None else (self.local_path,)

    def build(self, name: str, *, seed: int, shuffle: bool) -> DatasetTasks:
        """
        Raises:
            ConfigurationError: a package is missing, the hub cannot be reached, or the dataset,
                its split or a column does not exist.
        """
        return DatasetTasks(name, self, seed=seed, shuffle=shuffle)

    def task_data(self, row: Row) -> dict[str, Any]:
        """The row as the data of a task: JSON values under the names of `columns`.

        Raises:
            TaskFileError: a value has no JSON form.
        """
        data = {field: _entry(row, column) for field, column in self.columns.items()} or dict(row)
        try:
            plain: dict[str, Any] = orjson.loads(orjson.dumps(data))
        except TypeError as error:
            raise TaskFileError(
                f"{self.path}: a row cannot be written as JSON ({error}); name the columns that "
                "are needed in columns, as {field: column}"
            ) from None
        return plain


def _entry(row: Row, column: str) -> Any:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class DatasetTasks:
    """The tasks of a dataset, epoch by epoch."""

    def __init__(self, name: str, config: DatasetTasksConfig, *, seed: int, shuffle: bool) -> None:
        """Raises ConfigurationError: as `DatasetTasksConfig.build`."""
        self.name = name
        self.config = config
        self.dataset = open_dataset(config)
        self._seed = (seed, *name.encode())
        self._shuffle = shuffle

    def epoch(self, number: int) -> DatasetEpoch:
        return self.continued(number, {"windows": 0, "taken": 0, "start": None})

    def continued(self, number: int, position: Position) -> DatasetEpoch:
        return DatasetEpoch(self, number, position)

    def order(self, count: int, *what: int) -> list[int]:
        """A permutation of `count` places that the seed and `what` determine."""
        order = np.arange(count)
        if self._shuffle:
            np.random.default_rng([*self._seed, *what]).shuffle(order)
        return [int(place) for place in order]


class DatasetEpoch:
    """An iterator over the tasks of an epoch: window after window, each in an order of its own."""

    def __init__(self, tasks: DatasetTasks, number: int, position: Position) -> None:
        self._tasks = tasks
        self._number = number
        self._windows: int = position["windows"]
        self._rows = _Rows(tasks, number, position["start"])
        self._read_window()
        self._taken: int = position["taken"]

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        if self._taken == len(self._window):
            self._windows += 1
            self._read_window()
            self._taken = 0
        if not self._window:
            raise StopIteration
        task_id, row = self._window[self._order[self._taken]]
        self._taken += 1
        name, config = self._tasks.name, self._tasks.config
        data = {"task_id": f"{name}-{task_id}", **config.task_data(row)}
        return task_of(data, name, self._taken, f"{config.path}, row {task_id}")

    @property
    def position(self) -> Position:
        """Where the next task is, as JSON values."""
        return {"windows": self._windows, "taken": self._taken, "start": self._start}

    def _read_window(self) -> None:
        self._start = self._rows.position
        self._window = list(islice(self._rows, self._tasks.config.shuffle_rows))
        self._order = self._tasks.order(len(self._window), self._number, 0, self._windows)


class _Rows:
    """An iterator over the rows of an epoch with their names (`<file>-<row group>-<row>`)."""

    def __init__(self, tasks: DatasetTasks, epoch: int, position: Position | None) -> None:
        self._tasks = tasks
        self._epoch = epoch
        self._files = tasks.order(tasks.dataset.num_shards, epoch, 1)
        self._file = self._group = self._row = 0
        self._groups: list[tuple[int, Any]] = []
        """The row groups of the current file, in their order; empty before it is opened."""
        self._open: list[Generator[Row]] = []
        """The rest of the current row group; empty before it is opened."""
        # An open file of pyarrow cannot be closed after pyarrow's modules are gone.
        weakref.finalize(self, _close, self._open)
        if position is not None:
            self._file, self._group = position["file"], position["group"]
            self._row = position["row"]
            if "reader" in position:
                self._open_group(position["reader"])

    @property
    def position(self) -> Position:
        """Where the next row is."""
        at = {"file": self._file, "group": self._group, "row": self._row}
        if not self._open:
            return at
        return at | {"reader": self._groups[self._group][1].state_dict()}

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        return self

    def __next__(self) -> tuple[str, Row]:
        try:
            while self._file < len(self._files):
                if not self._open:
                    self._open_group(None)
                row = next(self._open[0], None)
                if row is not None:
                    self._row += 1
                    place = self._files[self._file], self._groups[self._group][0], self._row - 1
                    return "-".join(map(str, place)), row
                self._end_group()
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            reason = str(error).partition("\n")[0]
            raise TaskFileError(f"{self._tasks.config.path}: cannot read it: {reason}") from error
        raise StopIteration

    def _open_group(self, state: Mapping[str, Any] | None) -> None:
        if not self._groups:
            dataset = self._tasks.dataset
            file = dataset.shard(dataset.num_shards, self._files[self._file]).reshard()
            count = file.num_shards
            order = self._tasks.order(count, self._epoch, 2, self._file)
            self._groups = [(place, file.shard(count, place)) for place in order]
        group = self._groups[self._group][1]
        if state is not None:
            group.load_state_dict(dict(state))
        self._open.append(iter(group))

    def _end_group(self) -> None:
        self._open.clear()
        self._row = 0
        self._group += 1
        if self._group == len(self._groups):
            self._groups, self._group = [], 0
            self._file += 1


def _close(generators: list[Generator[Row]]) -> None:
    for generator in generators:
        generator.close()


def open_dataset(config: DatasetTasksConfig) -> Any:
    """The dataset as an IterableDataset of the columns that are needed.

    Raises:
        ConfigurationError: as `DatasetTasksConfig.build`.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigurationError(
            f"{config.path}: datasets are read with the package datasets; run `pip "
            "install datasets`"
        ) from None
    datasets.disable_progress_bars()
    local = config.local_path
    if local is None:
        # `datasets` would repeat its request for half a minute.
        with tempfile.TemporaryDirectory() as folder:
            download(config.path.removeprefix(HUB), "dataset", ["README.md"], Path(folder))
    elif not local.exists():
        raise ConfigurationError(
            f"{config.path}: no such file or folder; a dataset of the hub is hf://owner/name"
        )
    try:
        found = _saved(config, local) if local and _is_saved(local) else _streamed(config, local)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"{config.path}: cannot open it: {reason}") from error
    names = found.column_names
    wanted = {column.partition(".")[0] for column in config.columns.values()}
    if names is None or not wanted:
        return found
    if missing := sorted(wanted - set(names)):
        raise ConfigurationError(
            f"{config.path}: columns {missing} are not in the dataset; it has {names}"
        )
    return found.select_columns(sorted(wanted))


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _saved(config: DatasetTasksConfig, folder: Path) -> Any:
    """A folder of `save_to_disk`, which is mapped into memory and not read."""
    import datasets

    found = datasets.load_from_disk(str(folder))
    if isinstance(found, dict):
        if config.split not in found:
            raise ValueError(f"bad split {config.split!r}; it has {sorted(found)}")
        found = found[config.split]
    return found.to_iterable_dataset(num_shards=max(1, len(found) // BATCH_ROWS))


def _streamed(config: DatasetTasksConfig, local: Path | None) -> Any:
    import datasets

    if local is None:
        path, _, revision = config.path.removeprefix(HUB).partition("@")
        builder = datasets.load_dataset_builder(path, config.name, revision=revision or None)
    elif local.is_dir():
        builder = datasets.load_dataset_builder(str(local), config.name)
    else:
        kind = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}.get(local.suffix, "json")
        builder = datasets.load_dataset_builder(kind, data_files=str(local))
    if hasattr(builder.config, "batch_size"):  # of Parquet; else a whole row group is converted
        builder.config.batch_size = BATCH_ROWS
    return builder.as_streaming_dataset(split=config.split)
