"""Layouts of the store's tables, numbered from 1, and the steps from each layout to the next.

`sqlite_N.sql` and `postgres_N.sql` change a database of layout N - 1 into one of layout N; an empty
database has layout 0 and takes every step. A database records the number of its layout (SQLite:
`PRAGMA user_version`; PostgreSQL: table `agentic_proxy_schema`).

Invariant: the steps and the new number are written in one transaction. A released step is never
changed, and a step only adds (tables, indexes, columns with a default), so that a running proxy of
the previous release can continue to write to a migrated database.

To change the tables: add the next file for both databases, run `python -m
tests.proxy.store.dump_layout tests/proxy/store/layouts`, and commit its two files. From then on the
tests check that a store of this layout can be migrated.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Literal

from proxy.errors import ConfigurationError

Database = Literal["sqlite", "postgres"]


@dataclass(frozen=True, slots=True)
class Step:
    """One migration: the statements that lead to `layout` from the layout before it."""

    layout: int
    """The layout after this step."""
    sql: str

    @property
    def statements(self) -> list[str]:
        """The single statements, for SQLite, which commits before it runs a script of several."""
        return self.sql.split(";\n")


def steps(database: Database, layout: int, *, store: str) -> list[Step]:
    """The steps from `layout` to the newest layout, in order; empty if there is nothing to do.

    Raises:
        ConfigurationError: a newer version has migrated the database, which `store` names.
    """
    prefix = f"{database}_"
    files = {
        int(file.name.removeprefix(prefix).removesuffix(".sql")): file
        for file in resources.files(__name__).iterdir()
        if file.name.startswith(prefix)
    }
    newest = max(files)
    if layout > newest:
        raise ConfigurationError(
            f"store {store} has layout {layout}, but this version of agentic-rl supports layouts up"
            f" to {newest}; install the version that wrote it or a later one, or set `store` to"
            " another database"
        )
    return [
        Step(number, files[number].read_text(encoding="utf-8"))
        for number in range(layout + 1, newest + 1)
    ]
