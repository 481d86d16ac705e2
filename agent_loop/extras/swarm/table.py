"""The episodes on disk: a SQLite table, used from one thread, and a file for each recording.

Invariant: an episode's reward and state change in one transaction, and a batch's number is on all
of its episodes or on none. A change is on disk before the `Episode` shows it; a write that fails
raises `unavailable` and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from agent_loop.extras.swarm.episode import Episode
from agent_loop.extras.swarm.errors import SwarmError
from agent_loop.extras.swarm.wire import Decider, EpisodeState, EpisodeView, TaskCounts

T = TypeVar("T")
_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    number INTEGER PRIMARY KEY,
    episode_id TEXT UNIQUE NOT NULL,
    state TEXT NOT NULL,
    ended_number INTEGER,
    key_hash BLOB NOT NULL,
    view TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state);
CREATE INDEX IF NOT EXISTS episodes_by_end ON episodes (ended_number);
CREATE TABLE IF NOT EXISTS deciders (
    episode_id TEXT PRIMARY KEY, decider TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_COUNTED_EPISODES = 100_000
"""Number of the newest episodes that `tasks` counts, so that a long run does not slow it down."""
_TASKS = """
WITH newest AS (
    SELECT number, state, json_extract(view, '$.task_id') AS task, json_extract(view, '$.reward')
    AS reward FROM episodes ORDER BY number DESC LIMIT ?
), shown AS (
    SELECT task, max(number) AS last FROM newest WHERE task IS NOT NULL
    GROUP BY task ORDER BY last DESC LIMIT ?
)
SELECT task, state, count(*), count(reward), total(reward)
FROM newest JOIN shown USING (task) GROUP BY task, state ORDER BY max(last) DESC, task, state
"""
_SELECT = "SELECT view, key_hash, decider FROM episodes LEFT JOIN deciders USING (episode_id) "


class EpisodeTable:
    """Example: table = EpisodeTable(Path("runs/swarm")); await table.insert(episode)"""

    def __init__(self, folder: Path) -> None:
        """Opens, or creates, `swarm.sqlite` and `records/` in `folder`."""
        self.records = folder / "records"
        self.records.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._path = folder / "swarm.sqlite"
        self._database = self._thread.submit(_open, self._path).result()
        rows = self._thread.submit(_counts, self._database).result()
        self.counts: Counter[str] = Counter(rows)
        """Number of episodes by state, since the folder was created."""

    async def insert(self, episode: Episode) -> None:
        view = episode.view
        row = (view.episode_id, view.state.value, episode.key_hash, view.model_dump_json())
        await self._do(
            lambda db: db.execute(
                "INSERT INTO episodes (episode_id, state, key_hash, view) VALUES (?, ?, ?, ?)", row
            )
        )
        self.counts[view.state.value] += 1

    async def move(
        self,
        episodes: Sequence[Episode],
        state: EpisodeState,
        decider: Decider | None = None,
        **changes: Any,
    ) -> list[EpisodeView]:
        """Moves all of the episodes to `state` with these changes, or none. Returns their former
        views.

        Episodes are numbered in the order in which they end. `decider` is kept with prepared ones.
        """
        if not episodes:
            return []
        views = [episode.moved(state, **changes) for episode in episodes]
        rows = [
            (v.state.value, v.model_dump_json(), v.state is EpisodeState.ENDED, v.episode_id)
            for v in views
        ]
        whom = decider.model_dump_json() if decider else None
        await self._do(lambda db: _update(db, rows, whom))
        before = [episode.view for episode in episodes]
        for episode, view in zip(episodes, views, strict=True):
            episode.view, episode.decider = view, decider
        self.counts.subtract(view.state.value for view in before)
        self.counts.update(view.state.value for view in views)
        self.counts += Counter()  # removes states that no episode has
        return before

    async def get(self, episode_id: str) -> Episode | None:
        rows = await self._do(
            lambda db: db.execute(_SELECT + "WHERE episode_id = ?", (episode_id,)).fetchall()
        )
        return _episode(*rows[0]) if rows else None

    async def in_state(self, state: EpisodeState) -> list[Episode]:
        """The episodes in `state`, in the order of their ends, then of their claims."""
        rows = await self._do(
            lambda db: db.execute(
                _SELECT + "WHERE state = ? ORDER BY ended_number IS NULL, ended_number, number",
                (state.value,),
            ).fetchall()
        )
        return [_episode(*row) for row in rows]

    async def tasks(self, limit: int) -> list[TaskCounts]:
        """What became of the newest episodes by task, the task with the newest claim first; at
        most `limit` tasks. Read in another thread than the table's, so that no claim or end
        waits for it."""
        try:
            return await asyncio.to_thread(_tasks, self._path, limit)
        except sqlite3.Error as error:
            raise SwarmError(f"the swarm's database: {error}", "unavailable") from error

    async def remember(self, name: str, value: str) -> None:
        await self._do(
            lambda db: db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
        )

    async def recall(self, name: str) -> str | None:
        row = await self._do(
            lambda db: db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        )
        return None if row is None else str(row[0])

    def record_file(self, episode_id: str) -> Path:
        return self.records / f"{episode_id}.record"

    async def keep_record(self, episode_id: str, record: bytes) -> None:
        """Writes the recording; it is complete on disk when this returns.

        Raises `unavailable`: the write failed.
        """
        try:
            await asyncio.to_thread(_write_durably, self.record_file(episode_id), record)
        except OSError as error:
            raise SwarmError(f"cannot write the episode's recording: {error}", "unavailable") from (
                error
            )

    def remove_records(self, episodes: Iterable[Episode]) -> None:
        """A file that cannot be removed stays, and is logged: nothing depends on its removal."""
        for episode in episodes:
            try:
                self.record_file(episode.episode_id).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("cannot remove the recording of an episode: %s", error)

    async def close(self) -> None:
        await self._do(lambda db: db.close())
        self._thread.shutdown()

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, self._database)
        except sqlite3.Error as error:
            raise SwarmError(f"the swarm's database: {error}", "unavailable") from error


def _open(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.executescript(_SCHEMA)
    return database


def _counts(database: sqlite3.Connection) -> dict[str, int]:
    return dict(database.execute("SELECT state, count(*) FROM episodes GROUP BY state").fetchall())


def _tasks(path: Path, limit: int) -> list[TaskCounts]:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        rows = database.execute(_TASKS, (_COUNTED_EPISODES, limit)).fetchall()
    counts = []
    for task, group in groupby(rows, key=itemgetter(0)):
        states = list(group)
        rewards = sum(each[3] for each in states)
        mean = sum(each[4] for each in states) / rewards if rewards else None
        episodes = {each[1]: each[2] for each in states}
        counts.append(
            TaskCounts(task_id=task, episodes=episodes, rewards=rewards, mean_reward=mean)
        )
    return counts


def _episode(view: str, key_hash: bytes, decider: str | None) -> Episode:
    decides = None if decider is None else Decider.model_validate_json(decider)
    return Episode(EpisodeView.model_validate_json(view), key_hash, decides)


def _update(
    database: sqlite3.Connection, rows: Sequence[tuple[str, str, bool, str]], decider: str | None
) -> None:
    database.execute("BEGIN IMMEDIATE")
    with database:  # rolls back if it fails (a full disk), so that the next transaction can begin
        for state, view, ended, episode_id in rows:
            database.execute(
                "UPDATE episodes SET state = ?, view = ?, ended_number = CASE WHEN ? AND "
                "ended_number IS NULL THEN (SELECT ifnull(max(ended_number), 0) + 1 FROM episodes) "
                "ELSE ended_number END WHERE episode_id = ?",
                (state, view, ended, episode_id),
            )
            database.execute("DELETE FROM deciders WHERE episode_id = ?", (episode_id,))
            if decider is not None:
                database.execute("INSERT INTO deciders VALUES (?, ?)", (episode_id, decider))


def _write_durably(path: Path, data: bytes) -> None:
    """Writes the file so that it exists completely or not at all, even if the machine stops."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the file's name durable
    finally:
        os.close(folder)
