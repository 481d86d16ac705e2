"""`agentic-proxy ARGUMENT…`; one commit in twenty takes long, as on a disk that is busy."""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from typing import Any

from proxy.cli import main
from proxy.store import sqlite_group_commit

SLOW_S = 0.3
SHARE = 0.05

_commit = sqlite_group_commit._commit


def slow_commit(connection: sqlite3.Connection, batch: list[Any]) -> None:
    if random.random() < SHARE:
        time.sleep(SLOW_S)
    _commit(connection, batch)


if __name__ == "__main__":
    sqlite_group_commit._commit = slow_commit
    sys.exit(main())
