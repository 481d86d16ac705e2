"""The replay buffer: a SQLite file of all groups that were drawn and are not in a checkpoint yet.

Invariant: a drawn group is in the file, in exactly one state, from before its first trial starts
until a checkpoint that contains its effect is durable. So after `kill -9` at any instant, a
resumed run neither loses a task nor trains on a rollout twice:

    running   drawn; it is run again when the run is resumed
    ready     finished and kept
    taken     part of batch `batch`; deleted once a checkpoint contains that batch

A checkpoint stores the number of its last batch. `restore` deletes the groups of batches that the
checkpoint contains, and returns the other finished groups. Groups that were sampled by weights
newer than the checkpoint's are run again, because the resumed trainer does not have these weights.

A separate thread does all writing, in the order of the calls, because writing a group of a million
tokens takes a fifth of a second. Each write returns a future, which is done when the change is in
the file.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import Group, Task
from proxy.errors import ConfigurationError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'taken')),
    task TEXT NOT NULL,
    batch INTEGER,
    newest_version INTEGER,
    payload BLOB,
    tail TEXT NOT NULL DEFAULT 'none'
) STRICT;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""

Written = asyncio.Future[None]
"""A future that is done when the change is in the file; its exception is a `sqlite3.Error`."""


class Tail(StrEnum):
    """Whether a group was cancelled for its age and is to be run again."""

    NONE = "none"
    COLLECTED = "collected"
    """The group waits until `tail_groups` such groups are collected."""
    RELEASED = "released"
    """The group is run again, without over-sampling."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group that was drawn and is to be run. Example: Drawn(17, Task("sum-17", …))"""

    number: int
    """The group's number in the run, from which its rollouts' seeds are computed."""
    task: Task
    tail: Tail = Tail.NONE


@dataclass(frozen=True, slots=True)
class Restored:
    """What a resumed producer continues with."""

    ready: Mapping[int, Group]
    """Number of a group → the finished group."""
    again: tuple[Drawn, ...]
    """The groups to run again."""
    cursor: Any
    """The task stream's cursor; None in a new file."""
    intake: Any
    """State of the producer's `Intake`; None in a new file."""


class ReplayBuffer:
    """Example: ReplayBuffer(Path("runs/a/buffer.sqlite")), or ":memory:" for a temporary buffer."""

    def __init__(self, path: Path | str) -> None:
        """Raises ConfigurationError: the file cannot be opened or is not a buffer."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            # Commits survive the end of the process; only a power failure may lose the last ones.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"replay buffer {path}: {error}; give a writable path, or remove the file"
            ) from None
        self._writer = ThreadPoolExecutor(1, "replay-buffer")

    def draw(self, drawn: Drawn, cursor: Mapping[str, Any]) -> Written:
        """Adds a drawn group; to be called before its first trial starts. `cursor`, the task
        stream's position, is written in the same transaction."""
        row, now = (drawn.number, _dump(drawn.task)), json.dumps(dict(cursor))

        def write() -> None:
            with self._db:
                self._db.execute("BEGIN")
                self._db.execute(
                    "INSERT INTO groups (number, state, task) VALUES (?, 'running', ?)", row
                )
                self._db.execute("INSERT OR REPLACE INTO state VALUES ('cursor', ?)", (now,))

        return self._write(write)

    def put(self, number: int, group: Group) -> Written:
        """Stores a finished group that is kept."""

        def write() -> None:
            newest = max((r.newest_version for r in group.rollouts), default=0)
            self._db.execute(
                "UPDATE groups SET state = 'ready', payload = ?, newest_version = ? "
                "WHERE number = ?",
                (encode_group(group), newest, number),
            )

        return self._write(write)

    def set_tail(self, number: int, tail: Tail) -> Written:
        """Marks the group to be run again as a tail group."""
        change = "UPDATE groups SET state = 'running', payload = NULL, tail = ? WHERE number = ?"
        return self._write(lambda: self._many(change, [(tail.value, number)]))

    def drop(self, numbers: Iterable[int]) -> Written:
        """Deletes groups that are not trained on: filtered, failed or too old."""
        rows = [(number,) for number in numbers]
        return self._write(lambda: self._many("DELETE FROM groups WHERE number = ?", rows))

    def take(self, numbers: Iterable[int], batch: int) -> Written:
        """Makes the groups batch `batch`, which the trainer may get once this is written."""
        rows = [(batch, number) for number in numbers]
        change = "UPDATE groups SET state = 'taken', batch = ? WHERE number = ?"
        return self._write(lambda: self._many(change, rows))

    def acknowledge(self, batch: int) -> Written:
        """Deletes the groups of all batches up to `batch`: a durable checkpoint contains them."""
        return self._write(lambda: self._forget(batch))

    def set_intake(self, state: Mapping[str, Any]) -> Written:
        """Replaces the stored state of the producer's `Intake`."""
        row = ("intake", json.dumps(state))
        return self._write(lambda: self._many("INSERT OR REPLACE INTO state VALUES (?, ?)", [row]))

    def restore(self, batch: int, version: int) -> Restored:
        """What a producer continues with if its trainer resumes at `version`, from a checkpoint
        that contains all batches up to `batch`. Blocks until everything is read."""
        return self._writer.submit(self._restore, batch, version).result()

    def close(self) -> None:
        """Closes the file. Blocks until everything is written."""
        self._writer.shutdown()
        self._db.close()

    def _write(self, work: Callable[[], None]) -> Written:
        return asyncio.get_running_loop().run_in_executor(self._writer, work)

    def _many(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(statement, rows)

    def _forget(self, batch: int) -> None:
        self._db.execute("DELETE FROM groups WHERE state = 'taken' AND batch <= ?", (batch,))

    def _restore(self, batch: int, version: int) -> Restored:
        with self._db:
            self._db.execute("BEGIN")
            self._forget(batch)
            self._db.execute(
                "UPDATE groups SET state = iif(newest_version <= ?, 'ready', 'running'), "
                "batch = NULL WHERE state IN ('taken', 'ready')",
                (version,),
            )
            self._db.execute("UPDATE groups SET payload = NULL WHERE state = 'running'")
        query = "SELECT number, state, task, payload, tail FROM groups ORDER BY number"
        ready: dict[int, Group] = {}
        again: list[Drawn] = []
        for number, state, task, payload, tail in self._db.execute(query):
            if state == "ready":
                ready[number] = decode_group(payload)
            else:
                again.append(Drawn(number, Task(**json.loads(task)), Tail(tail)))
        return Restored(ready, tuple(again), self._read("cursor"), self._read("intake"))

    def _read(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])


def _dump(task: Task) -> str:
    fields = {
        "task_id": task.task_id,
        "data": dict(task.data),
        "source": task.source,
        "agent": task.agent,
    }
    return json.dumps(fields, default=str)
