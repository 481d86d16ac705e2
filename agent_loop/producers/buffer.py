"""The replay buffer: a SQLite file of what was drawn, what is ready, and what was handed over.

Invariant: a drawn group is in the file, in exactly one state, from before its first trial starts
until a checkpoint that contains its effect is durable. So after `kill -9` at any instant, a
resumed run neither loses a task nor trains on a rollout twice:

    running   drawn; on resume it is run again
    ready     finished and kept
    taken     handed over in batch `batch`; gone for good once a checkpoint has that batch

A checkpoint stores the number of its last batch. `restore` forgets what that checkpoint has seen
and gives back what it has not, except for what was sampled by weights that the resumed trainer
does not have any more: those groups are run again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.records import Group, Task
from agent_loop.rollout_format import decode_group, encode_group
from proxy.errors import ConfigurationError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'taken')),
    task TEXT NOT NULL,
    batch INTEGER,
    newest_version INTEGER,
    payload BLOB
) STRICT;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group that was drawn and is to be run. Example: Drawn(17, Task("sum-17", …))"""

    number: int
    """The group's ordinal in the run: what its rollouts' seeds are made from."""
    task: Task


class ReplayBuffer:
    """Example: ReplayBuffer(Path("runs/a/buffer.sqlite")), or ":memory:" if it need not last."""

    def __init__(self, path: Path | str) -> None:
        """Raises ConfigurationError: the file cannot be opened or is not a buffer."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            # A commit survives the process at once; only a power cut may take the last ones.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"replay buffer {path}: {error}; give a writable path, or remove the file"
            ) from None

    def draw(self, drawn: Drawn, cursor: Mapping[str, Any]) -> None:
        """Before its first trial starts; with the stream's cursor, in one transaction."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO groups (number, state, task) VALUES (?, 'running', ?)",
                (drawn.number, _dump(drawn.task)),
            )
            self._db.execute(
                "INSERT OR REPLACE INTO state VALUES ('cursor', ?)", (json.dumps(dict(cursor)),)
            )

    def put(self, number: int, group: Group) -> None:
        newest = max((r.newest_version for r in group.rollouts), default=0)
        self._db.execute(
            "UPDATE groups SET state = 'ready', payload = ?, newest_version = ? WHERE number = ?",
            (encode_group(group), newest, number),
        )

    def drop(self, numbers: Iterable[int]) -> None:
        """Not worth training on: filtered, failed, too old."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "DELETE FROM groups WHERE number = ?", [(number,) for number in numbers]
            )

    def take(self, numbers: Iterable[int], batch: int) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "UPDATE groups SET state = 'taken', batch = ? WHERE number = ?",
                [(batch, number) for number in numbers],
            )

    def acknowledge(self, batch: int) -> None:
        """A checkpoint that contains batch `batch` is durable: forget what it has seen."""
        self._db.execute("DELETE FROM groups WHERE state = 'taken' AND batch <= ?", (batch,))

    def restore(self, batch: int, version: int) -> tuple[dict[int, Group], list[Drawn], Any]:
        """For a trainer that resumes at `version`, having seen all batches up to `batch`.

        Returns the groups that are ready, by number; those to be run again; the stream's cursor
        (None in a new file).
        """
        with self._db:
            self._db.execute("BEGIN")
            self.acknowledge(batch)
            self._db.execute(
                "UPDATE groups SET state = iif(newest_version <= ?, 'ready', 'running'), "
                "batch = NULL WHERE state IN ('taken', 'ready')",
                (version,),
            )
            self._db.execute("UPDATE groups SET payload = NULL WHERE state = 'running'")
        rows = self._db.execute("SELECT number, state, task, payload FROM groups ORDER BY number")
        ready: dict[int, Group] = {}
        again: list[Drawn] = []
        for number, state, task, payload in rows:
            if state == "ready":
                ready[number] = decode_group(payload)
            else:
                again.append(Drawn(number, Task(**json.loads(task))))
        return ready, again, self.read_state("cursor")

    def write_state(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, json.dumps(value)))

    def read_state(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def close(self) -> None:
        self._db.close()


def _dump(task: Task) -> str:
    fields = {"task_id": task.task_id, "data": dict(task.data), "source": task.source}
    return json.dumps(fields, default=str)
