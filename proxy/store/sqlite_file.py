"""Connections to the file of a SQLite store: opened, created and limited."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from proxy.store import layout
from proxy.store.protocol import Durability

CACHE_KIB = 16 * 1024  # per connection, so that the store's memory does not grow with the file


def make_private(path: Path) -> None:
    """Makes the file, which only this user may read, if there is none. SQLite gives the files
    beside it the same mode."""
    with suppress(FileExistsError):
        path.touch(0o600, exist_ok=False)


def connect(path: Path, durability: Durability, busy_timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
    )
    synchronous = "FULL" if durability == "power" else "NORMAL"
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    return connection


def make_file(connection: sqlite3.Connection) -> None:
    """Sets what the file itself keeps. Waits for other processes' writes: so only where it may."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only in a new file
    connection.execute("PRAGMA journal_mode = WAL")


def never_wait(connection: sqlite3.Connection) -> None:
    """Readies a connection for the event loop: it waits neither for a lock nor for a checkpoint."""
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA busy_timeout = 0")


def create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Creates the tables in an empty file. Closes the connection if that fails.

    Raises:
        ConfigurationError: the file is a store of another layout, and is unchanged.
    """
    with ExitStack() as on_error:
        on_error.callback(connection.close)
        connection.execute("BEGIN IMMEDIATE")  # two processes may open the file at the same time
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found == 0:
            # Not `executescript`, which commits before it begins.
            for statement in layout.script("sqlite").split(";\n"):
                connection.execute(statement)
            row = (layout.LAYOUT, layout.this_version())
            connection.execute("INSERT INTO agentic_proxy_schema VALUES (?, ?)", row)
            connection.execute(f"PRAGMA user_version = {layout.LAYOUT}")
        else:
            layout.check(found, _written_by(connection), store=str(path))
        connection.execute("COMMIT")
        on_error.pop_all()


def _written_by(connection: sqlite3.Connection) -> str | None:
    try:
        row = connection.execute("SELECT written_by FROM agentic_proxy_schema").fetchone()
    except sqlite3.OperationalError:  # no such table
        return None
    return str(row[0])


def is_without_layout(file: Path) -> bool:
    """Whether the file is empty or the database of another program, which is only read here."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error:  # opening the store reports it
        return False
    return bool(found == 0)


def limit_size(connection: sqlite3.Connection, max_file_bytes: int | None) -> None:
    if max_file_bytes is not None:
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, max_file_bytes // page_bytes)}")
