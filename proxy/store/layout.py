"""The layout of the store's tables: `sqlite.sql` and `postgres.sql`, which create the same tables.

A store records the number of its layout and the version of agentic-rl that created it, in the
table `agentic_proxy_schema`; SQLite also in `PRAGMA user_version`.

Invariant: a store of another layout is refused and not changed. To change the tables, change both
scripts and increase `LAYOUT`.
"""

from __future__ import annotations

from importlib import metadata, resources
from typing import Literal

from proxy.errors import ConfigurationError

LAYOUT = 16
"""Layouts 1 to 13 were those of version 0.1.0 while it was developed."""
_FIRST_WITH_VERSION = 14
"""Stores of earlier layouts do not record the version that created them."""


def script(database: Literal["sqlite", "postgres"]) -> str:
    """The statements that create the tables."""
    return resources.files("proxy.store").joinpath(f"{database}.sql").read_text(encoding="utf-8")


def this_version() -> str:
    """The installed version of agentic-rl, as the store records it. Example: "0.2.0"."""
    return metadata.version("agentic-rl")


def check(layout: int, written_by: str | None, *, store: str) -> None:
    """Checks what `store`, a file or URL, records. `written_by` is None if it records no version.

    Raises:
        ConfigurationError: this version of agentic-rl cannot read the layout.
    """
    if layout == LAYOUT:
        return
    if written_by is None:
        written_by = "0.1.0" if layout < _FIRST_WITH_VERSION else "a later version"
    to_read = f"this version, {this_version()}, reads only layout {LAYOUT}"
    raise ConfigurationError(
        f"store {store} has layout {layout} and was created by agentic-rl {written_by}; {to_read}."
        f" To keep its sessions, run `agentic-proxy export --format records` with agentic-rl"
        f" {written_by}; to begin with an empty store, set `store` to a new file or database"
    )
