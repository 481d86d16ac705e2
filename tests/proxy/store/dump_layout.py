"""Dumps a small store of the current layout as SQL, for `test_migrations.py`.

    python -m tests.proxy.store.dump_layout tests/proxy/store/layouts

Run it after you have added a migration, and commit its files: one for SQLite, one for PostgreSQL
(which must be installed).
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from proxy.records import Reward, SessionStatus
from proxy.store import migrations, open_store
from tests.postgres_server import binaries, empty_database, postgres_server
from tests.proxy.store.test_conformance import a_session, an_intent, answered

LAYOUT = migrations.steps("sqlite", 0, store="")[-1].layout
NOT_SQL = ("--", "\\", "SET ", "SELECT pg_catalog.set_config")
"""Beginnings of the lines of `pg_dump` that configure its own connection."""


async def fill(url: str) -> None:
    store = await open_store(url)
    await store.create_session(a_session())
    await store.create_session(a_session("task/7-b"))
    for index in range(3):
        await store.begin_turn(an_intent(index=index))
    for index in range(2):
        await store.commit_turn(answered(an_intent(index=index)))
    await store.add_reward("task/7-a", Reward(key="verifier", value=1.0, parts={"tests": 0.5}))
    await store.add_event("task/7-a", "refused", {"status": 400})
    await store.set_status("task/7-b", SessionStatus.COMPLETED, at=50.0)
    await store.close()


def dump_sqlite() -> str:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fill(f"sqlite:///{folder}/s.sqlite"))
        connection = sqlite3.connect(f"{folder}/s.sqlite")
        *lines, commit = connection.iterdump()
        connection.close()
    return "\n".join([*lines, f"PRAGMA user_version = {LAYOUT};", commit]) + "\n"


def dump_postgres(programs: Path) -> str:
    with postgres_server(programs) as server:
        url = asyncio.run(empty_database(server))
        asyncio.run(fill(url))
        command = [programs / "pg_dump", "--inserts", "--no-owner", "--no-privileges", url]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if line and not line.startswith(NOT_SQL)) + "\n"


def main() -> None:
    programs = binaries()
    if programs is None:
        sys.exit("PostgreSQL is not installed: apt-get install postgresql")
    folder = Path(sys.argv[1])
    (folder / f"sqlite_{LAYOUT}.sql").write_text(dump_sqlite())
    (folder / f"postgres_{LAYOUT}.sql").write_text(dump_postgres(programs))


if __name__ == "__main__":
    main()
