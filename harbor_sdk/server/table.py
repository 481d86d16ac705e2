"""The run table: every accepted run, on disk before the answer to its submission is sent.

Invariant: a run is written as `queued` before 202 is sent, and in its final status before a client
can see that status. An idempotency key names at most one run. One thread owns the database.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harbor_sdk.models import AgentRun, AgentRunRequest, RunEvent, RunStatus

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY,
    idempotency_key TEXT UNIQUE,
    fingerprint TEXT NOT NULL,
    status TEXT NOT NULL,
    job_id TEXT NOT NULL,
    created_at REAL NOT NULL,
    finished_at REAL,
    request TEXT,
    task_dir TEXT,
    run TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (created_at);
CREATE TABLE IF NOT EXISTS events (
    run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    number INTEGER NOT NULL,
    event TEXT NOT NULL,
    PRIMARY KEY (run_id, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted request with its run. `task_dir` holds the uploaded task."""

    run: AgentRun
    request: AgentRunRequest
    task_dir: Path | None
    idempotency_key: str | None = None
    fingerprint: str = ""
    """Digest of metadata and archive. The same key with another digest is refused."""


class RunTable:
    """The runs and their events in an SQLite file."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run-table")
        self._database = self._thread.submit(_open, path).result()

    async def insert(self, submission: Submission) -> None:
        run = submission.run
        row = (
            run.run_id,
            submission.idempotency_key,
            submission.fingerprint,
            run.status.value,
            run.job_id,
            run.created_at,
            submission.request.model_dump_json(),
            str(submission.task_dir) if submission.task_dir else None,
            run.model_dump_json(),
        )
        await self._do(
            lambda db: db.execute(
                "INSERT INTO runs (run_id, idempotency_key, fingerprint, status, job_id, "
                "created_at, request, task_dir, run) VALUES (?,?,?,?,?,?,?,?,?)",
                row,
            )
        )

    async def update(self, event: RunEvent) -> None:
        """Writes the run's new state and its event in one transaction."""
        await self._do(lambda db: _update(db, event))

    async def get(self, run_id: str) -> AgentRun | None:
        rows = await self._do(
            lambda db: db.execute("SELECT run FROM runs WHERE run_id = ?", (run_id,)).fetchall()
        )
        return AgentRun.model_validate_json(rows[0][0]) if rows else None

    async def by_key(self, key: str) -> tuple[AgentRun, str] | None:
        """The run with this idempotency key and its fingerprint, or None."""
        rows = await self._do(
            lambda db: db.execute(
                "SELECT run, fingerprint FROM runs WHERE idempotency_key = ?", (key,)
            ).fetchall()
        )
        return (AgentRun.model_validate_json(rows[0][0]), rows[0][1]) if rows else None

    async def page(
        self, *, job_id: str | None, status: str | None, limit: int, offset: int
    ) -> tuple[list[AgentRun], int]:
        """The runs of one page, newest first, and the number of all runs that match."""
        where = "(:job IS NULL OR job_id = :job) AND (:status IS NULL OR status = :status)"
        values = {"job": job_id, "status": status, "limit": limit, "offset": offset}
        count = f"SELECT count(*) FROM runs WHERE {where}"
        select = (
            f"SELECT run FROM runs WHERE {where}"
            " ORDER BY created_at DESC LIMIT :limit OFFSET :offset"
        )
        rows = await self._do(lambda db: db.execute(select, values).fetchall())
        total = await self._do(lambda db: db.execute(count, values).fetchone()[0])
        return [AgentRun.model_validate_json(row[0]) for row in rows], int(total)

    async def events_after(self, run_id: str, number: int) -> list[RunEvent]:
        rows = await self._do(
            lambda db: db.execute(
                "SELECT event FROM events WHERE run_id = ? AND number > ? ORDER BY number",
                (run_id, number),
            ).fetchall()
        )
        return [RunEvent.model_validate_json(row[0]) for row in rows]

    async def last_event_number(self, run_id: str) -> int:
        row = await self._do(
            lambda db: db.execute(
                "SELECT max(number) FROM events WHERE run_id = ?", (run_id,)
            ).fetchone()
        )
        return int(row[0] or 0)

    async def unfinished(self) -> list[Submission]:
        """Queued and running runs, in the order of their submission."""
        rows = await self._do(
            lambda db: db.execute(
                "SELECT run, request, task_dir FROM runs WHERE status IN (?, ?) ORDER BY rowid",
                (RunStatus.QUEUED.value, RunStatus.RUNNING.value),
            ).fetchall()
        )
        return [
            Submission(
                AgentRun.model_validate_json(run),
                AgentRunRequest.model_validate_json(request),
                Path(task_dir) if task_dir else None,
            )
            for run, request, task_dir in rows
        ]

    async def counts(self) -> dict[str, int]:
        """The number of runs in the table by their status."""
        sql = "SELECT status, count(*) FROM runs GROUP BY status"
        return dict(await self._do(lambda db: db.execute(sql).fetchall()))

    async def run_ids(self) -> set[str]:
        rows = await self._do(lambda db: db.execute("SELECT run_id FROM runs").fetchall())
        return {row[0] for row in rows}

    async def finished_before(self, time: float) -> list[str]:
        """The ids of the runs that finished before this Unix time."""
        rows = await self._do(
            lambda db: db.execute(
                "SELECT run_id FROM runs WHERE finished_at < ?", (time,)
            ).fetchall()
        )
        return [row[0] for row in rows]

    async def remove(self, run_id: str) -> None:
        await self._do(lambda db: db.execute("DELETE FROM runs WHERE run_id = ?", (run_id,)))

    async def close(self) -> None:
        await self._do(lambda db: db.close())
        self._thread.shutdown()

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._database)


def _open(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)  # it holds the session keys of queued runs
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("PRAGMA foreign_keys=ON")
    database.executescript(_SCHEMA)
    return database


def _update(database: sqlite3.Connection, event: RunEvent) -> None:
    run = event.run
    text = event.model_dump_json(exclude={"run": {"rollout_details"}})
    row = (run.status.value, run.finished_at, run.model_dump_json(), run.status.is_final)
    database.execute("BEGIN IMMEDIATE")  # nothing of Python can fail between it and COMMIT
    database.execute(
        "UPDATE runs SET status = ?, finished_at = ?, run = ?, "
        "request = CASE WHEN ? THEN NULL ELSE request END WHERE run_id = ?",
        (*row, run.run_id),
    )
    database.execute(
        "INSERT INTO events (run_id, number, event) VALUES (?, ?, ?)",
        (run.run_id, event.number, text),
    )
    database.execute("COMMIT")
