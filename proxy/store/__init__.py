"""Where turns are recorded: `open_store` gives the store that a URL names."""

from __future__ import annotations

from pathlib import Path

from proxy.errors import ConfigurationError
from proxy.store.postgres import PostgresStore
from proxy.store.protocol import Store
from proxy.store.sqlite import Durability, SqliteStore


async def open_store(url: str, *, durability: Durability = "process") -> Store:
    """`postgresql://…`, `sqlite:///FILE` (four slashes for an absolute path), or the file alone.

    Raises ConfigurationError when it cannot be opened.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return SqliteStore(Path(url), durability=durability)
    if scheme == "sqlite":
        return SqliteStore(Path(rest.removeprefix("/")), durability=durability)
    if scheme in ("postgres", "postgresql"):
        return await PostgresStore.open(url, durability=durability)
    raise ConfigurationError(f"store: {url!r} is neither sqlite:///FILE nor postgresql://…")
