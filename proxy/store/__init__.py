"""Where turns are recorded: `open_store` gives the store that a path or URL names."""

from __future__ import annotations

from pathlib import Path

from proxy.store.protocol import Store
from proxy.store.sqlite import Durability, SqliteStore


async def open_store(where: str, *, durability: Durability = "process") -> Store:
    """`where` is a file (SQLite).

    Raises ConfigurationError when it cannot be opened.
    """
    return SqliteStore(Path(where), durability=durability)
